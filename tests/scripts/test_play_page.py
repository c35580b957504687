"""The page of play.py in a real browser: text, probabilities, heads switched off, keyboard, and hostile text."""

import contextlib

import pytest
import torch

from tests.browser import chromium, no_messages_or_requests, resize, tap
from tests.conftest import byte_model
from tests.scripts.play import PlayPage, known, served
from tril.model.heads.live import prompt_tokens

HOSTILE = "</script><img src=x onerror=alert(1)>\n&lt;b\t\x07 שלום 🙂{{7*7}}"
SYMBOLS = {" ": "·", "\n": "↵", "\t": "→", "\x7f": "␡"}
NEW = ".token[role=button]"
AS_ON_PAGE = {"seed": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def lms():
    torch.manual_seed(0)
    return [byte_model(context_length=40), byte_model(context_length=40, n_layers=3, n_heads=2)]


@pytest.fixture
def page(driver, lms, monkeypatch):
    """Opens the page of some models. It may write no console message and ask no other server."""
    resize(driver, 1280, 900)
    get_log = driver.get_log
    with contextlib.ExitStack() as stack:

        def start(*models, prompt="def ", **fields):
            server = stack.enter_context(served(*(models or lms[:1]), prompt=prompt))
            its_own = f'"http://127.0.0.1:{server.port}/'
            others = lambda kind: [x for x in get_log(kind) if kind == "browser" or its_own not in x["message"]]  # noqa: E731
            monkeypatch.setattr(driver, "get_log", others)
            stack.enter_context(no_messages_or_requests(driver))
            return PlayPage(driver).open(server, **fields)

        yield start


def ids_of(tokens):
    return [token.id for token in tokens]


def visible(text):
    """As the page writes the name of a token."""
    return "".join(SYMBOLS.get(c, chr(0x2400 + ord(c)) if c < " " else c) for c in text)


def percent(p):
    return "0" if p == 0 else "< 0.1 %" if p < 0.001 else f"{100 * p:.1f} %"


def test_a_head_that_is_switched_off_changes_text_and_probabilities_as_computed(page, lms):
    greedy = {"temperature": 0.0, **AS_ON_PAGE}
    page, whole, gate = page(temperature="0").generate(), known(lms[0], **greedy), torch.ones(2, 4)
    assert page.texts(".token.given") == list("def ") and page.ids() == ids_of(whole)
    assert page.texts(".status")[0].startswith("12 tokens, ") and len(page.texts(NEW)) == 12
    page.click(".switch[title=L0H1]")
    gate[0, 1] = 0
    without = known(lms[0], gate=gate, **greedy)
    first = next(t for t in range(12) if whole[t].id != without[t].id)
    assert page.ids() == ids_of(without) and page.attributes(".strip.off", "title") == ["L0H1"]
    assert page.texts(".token.differs") == page.texts(NEW)[first:]
    assert page.texts(".whole q") == ["".join(token.text for token in whole[first:])]
    page.point(page.token(0))
    cells, candidates = page.texts(".candidates tbody :is(th, td)"), without[0].candidates
    drawn = [f"▸{visible(c.name)} (drawn)" if c.id == without[0].id else visible(c.name) for c in candidates]
    before = {c.id: percent(c.drawn_from) for c in whole[0].candidates}
    columns = [drawn, [percent(c.model) for c in candidates], [before.get(c.id, "–") for c in candidates]]
    assert [cells[0::5], cells[3::5], cells[4::5]] == columns
    assert page.click(".restore").ids() == ids_of(whole) and page.texts(".token.differs") == []


def test_hostile_text_creates_no_element(page, lms):
    page = page(prompt=HOSTILE, max_new_tokens=2).generate()
    shown = "".join(page.texts(".token.given"))
    expected = "".join(text or "⋯" for _, text in prompt_tokens(lms[0], HOSTILE))  # ⋯: a part of a character
    assert shown == visible(expected).replace("·", " ").replace("↵", "↵\n")
    page.js("report(arguments[0])", HOSTILE)
    assert page.texts("#error") == [HOSTILE]
    assert page.js("return [document.images.length, document.scripts.length]") == [0, 3]


def test_a_refusal_is_one_line_and_goes_away(page):
    page = page(temperature="11").generate()
    assert page.texts("#error") == ["temperature=11 must be less than or equal to 10"] and page.texts(NEW) == []
    page.fill(temperature="1", top_k="")
    assert page.generate().texts("#error") == [""] and len(page.texts(NEW)) == 12
    [message] = [entry["message"] for entry in page.driver.get_log("browser")]  # the browser's own, on status 400
    assert "/generate" in message and "400" in message


def test_the_stop_button_and_a_new_run_end_the_one_before(page):
    lm, steps = byte_model(context_length=40), []
    lm.eot_id = -1  # nothing else ends the text
    lm.model.norm.register_forward_hook(lambda *_: steps.append(1))
    page = page(lm, max_new_tokens=500)
    page.find("#generate").click()
    page.until("panes[0].tokens.length > 2")
    page.find("#stop").click()
    n = len(page.ids())
    assert page.texts(".status") == [f"{n} tokens, stopped"] and n < 500
    page.find("#generate").click()
    page.fill(max_new_tokens=3)
    assert len(page.generate().ids()) == 3 and len(steps) < 900  # two complete runs take 1,000 steps


def test_everything_can_be_reached_by_keyboard(page):
    page = page().generate()
    page.js("document.querySelector('#generate').focus()")
    page.press("TAB", "HOME", "ARROW_RIGHT", "ARROW_RIGHT")  # past Stop, which is disabled, to the selected token
    page.press("ENTER", "END")
    assert [page.pane(0, "pinned"), page.pane(0, "selected")] == [2, 2]
    page.press("TAB", "ARROW_DOWN", "ARROW_RIGHT", "ENTER")  # the switches: L0H0, L1H0, L1H1
    page.until("$('stop').disabled")
    assert page.pane(0, "removed") == ["L1H1"] and page.pane(0, "selected") == 2
    page.press("TAB", "ARROW_RIGHT", "ENTER")  # the strips: L0H0, L0H1
    assert page.attributes(".strip[aria-pressed=true]", "title") == ["L0H1"]


def test_two_models_on_a_small_dark_touch_screen_do_not_scroll_sideways(page, driver, lms):
    page = page(*lms, prompt="x" * 300, max_new_tokens=5)
    resize(driver, 400, 800, dark=True, touch=True)
    page.generate().click(".switch[title=L0H1]")
    assert page.ids(1) == ids_of(known(lms[1], "x" * 300, seed=0, max_new_tokens=5))
    tap(driver, page.token(3))
    assert page.pane(0, "pinned") == 3
    assert page.js("return [innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [400, True]
    wide = "(e) => e.scrollWidth > e.clientWidth"
    assert page.js(f"return [...document.querySelectorAll('section, form, .text, table')].filter({wide}).length") == 0
    background = page.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert sum(background) < 200
