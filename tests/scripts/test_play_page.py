"""The page of play.py in a real browser: text, probabilities, attention, heads switched off, and hostile text."""

import contextlib

import pytest
import torch

from tests.browser import chromium, resize, tap
from tests.model.test_checkpoint import language_model
from tests.scripts.play_page import N_TOKENS, NEW, PlayPage, known, only_requests_to, percent, visible, weight
from tests.scripts.play_server import served
from tril.model.heads.live import prompt_tokens

HOSTILE = "</script><img src=x onerror=alert(1)>\n&lt;b\t\x07 שלום 🙂{{7*7}}"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def lms():
    torch.manual_seed(0)
    return [language_model(context_length=40), language_model(context_length=40, n_layers=3, n_heads=2)]


@pytest.fixture
def page(driver, lms):
    """Opens the page of some models. It may write no console message and ask no other server."""
    resize(driver, 1280, 900)
    with contextlib.ExitStack() as stack:

        def start(*models, prompt="def ", **fields):
            server = stack.enter_context(served(*(models or lms[:1]), prompt=prompt))
            stack.enter_context(only_requests_to(driver, server.port))
            return PlayPage(driver).open(server, **fields)

        yield start


def test_a_prompt_streams_and_a_token_shows_what_it_was_drawn_from(page, lms):
    page, tokens = page().generate(), known(lms[0])
    assert page.pane(0, "tokens.map((token) => token.text)") == [token.text for token in tokens]
    assert page.texts(".token.given") == list("def ") and len(page.texts(NEW)) == len(tokens) == N_TOKENS
    assert page.texts(".status")[0].startswith(f"{N_TOKENS} tokens, ")
    for t in (2, 9):
        page.point(page.token(t))
        for (name, _, *values), candidate in zip(page.candidates(), tokens[t].candidates, strict=True):
            marked = f"▸{visible(candidate.name)} (drawn)" if candidate.id == tokens[t].id else visible(candidate.name)
            assert [name, *values] == [marked, percent(candidate.drawn_from), percent(candidate.model), "–"]
        assert len(page.texts(".candidates tr.drawn")) == 1


def test_a_token_shows_what_the_chosen_head_attended_to(page, lms):
    page, tokens, t = page().generate(), known(lms[0]), 9
    page.point(page.token(t))
    page.find(".strip[title='L1H3']").click()
    weights = tokens[t].attention[1, 3].tolist()
    assert len(weights) == 4 + t  # the prompt, and the new tokens before this one
    shown = [f"weight {weight(w)}" for w in weights]
    assert page.attributes(".token", "title") == shown + [""] * (N_TOKENS - t)
    assert page.texts(".list > :nth-child(3n)") == [weight(w) for w in sorted(weights, reverse=True)[:6]]
    assert page.texts(".name") == ["L1H3"]


def test_a_head_that_is_switched_off_changes_text_and_probabilities_as_computed(page, lms):
    page = page(temperature="0").generate()
    page.switch("L0H1")
    gate = torch.ones(2, 4)
    gate[0, 1] = 0
    whole, without = known(lms[0], temperature=0.0), known(lms[0], gate=gate, temperature=0.0)
    ids = [[token.id for token in tokens] for tokens in (whole, without)]
    first = next(t for t in range(N_TOKENS) if ids[0][t] != ids[1][t])
    assert page.ids() == ids[1] != ids[0]
    assert page.texts(".token.differs") == page.texts(NEW)[first:]
    rest = "".join(token.text for token in whole[first:])
    assert page.texts(".whole q") == [rest] and page.attributes(".strip.off", "title") == ["L0H1"]
    page.point(page.token(0))
    _, _, _, model, before = zip(*page.candidates(), strict=True)
    assert model == tuple(percent(c.model) for c in without[0].candidates)
    assert model != tuple(percent(c.model) for c in whole[0].candidates)
    known_before = {c.id: percent(c.drawn_from) for c in whole[0].candidates}
    assert before == tuple(known_before.get(c.id, "–") for c in without[0].candidates)
    assert page.find(".candidates tbody .before").is_displayed()
    page.find(".restore").click()
    page.until_done()
    assert page.ids() == ids[0] and page.texts(".token.differs") == []
    assert not page.find(".candidates tbody .before").is_displayed()


def test_two_checkpoints_stand_side_by_side_with_heads_of_their_own(page, lms):
    page = page(*lms).generate()
    first, second = (page.js(f"return panes[{i}].root.getBoundingClientRect().toJSON()") for i in (0, 1))
    assert first["top"] == second["top"] and first["right"] < second["left"]
    assert page.texts(".model") == ["model 0", "model 1"]
    page.switch("L0H1", 1)
    gate = torch.ones(3, 2)
    gate[0, 1] = 0
    for number, tokens in enumerate((known(lms[0]), known(lms[1], gate=gate))):
        assert page.ids(number) == [token.id for token in tokens]


def test_hostile_text_creates_no_element(page, lms):
    page = page(prompt=HOSTILE, max_new_tokens=2).generate()
    shown = "".join(page.texts(".token.given"))
    expected = "".join(text or "⋯" for _, text in prompt_tokens(lms[0], HOSTILE))  # ⋯: a part of a character
    assert shown == visible(expected).replace("·", " ").replace("↵", "↵\n")
    assert "<img src=x onerror=alert(1)>" in shown
    page.js("report(arguments[0])", HOSTILE)
    assert page.texts("#error") == [HOSTILE]
    assert page.js("return [document.images.length, document.scripts.length]") == [0, 3]


def test_a_refusal_is_one_line_and_goes_away(page):
    page = page(temperature="11").generate()
    assert page.texts("#error") == ["temperature=11 must be less than or equal to 10"] and page.texts(NEW) == []
    page.fill(temperature="1", top_k="")
    assert page.generate().texts("#error") == [""] and len(page.texts(NEW)) == N_TOKENS
    [message] = [entry["message"] for entry in page.driver.get_log("browser")]  # the browser's own, on status 400
    assert "/generate" in message and "400" in message


def test_the_stop_button_and_a_new_run_end_the_one_before(page):
    lm, steps = language_model(context_length=40), []
    lm.eot_id = -1  # nothing else ends the text
    lm.model.norm.register_forward_hook(lambda *_: steps.append(1))
    page = page(lm, max_new_tokens=500)
    page.find("#generate").click()
    page.until("panes[0].tokens.length > 2")
    page.find("#stop").click()
    n = page.pane(0, "tokens.length")
    assert page.texts(".status") == [f"{n} tokens, stopped"] and n < 500
    page.find("#generate").click()
    page.fill(max_new_tokens=3)
    page.find("#generate").click()
    page.until_done()
    assert page.pane(0, "tokens.length") == 3 and len(steps) < 900  # two complete runs take 1,000 steps


def test_everything_can_be_reached_by_keyboard(page):
    page = page().generate()
    page.js("document.querySelector('#generate').focus()")
    page.press("TAB", "HOME", "ARROW_RIGHT", "ARROW_RIGHT")  # past Stop, which is disabled, to the selected token
    assert page.pane(0, "selected") == 2
    page.press("ENTER", "END")
    assert [page.pane(0, "pinned"), page.pane(0, "selected")] == [2, 2]
    page.press("TAB", "ARROW_DOWN", "ARROW_RIGHT", "ENTER")  # the switches: L0H0, L1H0, L1H1
    page.until_done()
    assert page.pane(0, "removed") == ["L1H1"] and page.pane(0, "selected") == 2
    page.press("TAB", "ARROW_RIGHT", "ENTER")  # the strips: L0H0, L0H1
    assert page.attributes(".strip[aria-pressed=true]", "title") == ["L0H1"]


@pytest.mark.parametrize("width, dark", [(400, True), pytest.param(1000, False, marks=pytest.mark.slow)])
def test_no_width_makes_the_page_scroll_sideways(page, driver, lms, width, dark):
    page = page(*lms, prompt="x" * 300, max_new_tokens=5)
    resize(driver, width, 800, dark=dark, touch=width == 400)
    page.generate().switch("L0H1")
    if width == 400:
        tap(driver, page.token(3))
        assert page.pane(0, "pinned") == 3
    assert page.js("return [innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]
    wide = "(e) => e.scrollWidth > e.clientWidth"
    assert page.js(f"return [...document.querySelectorAll('section, form, .text, table')].filter({wide}).length") == 0
    background = page.js("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(background) < 200) == dark
