"""The attention page used with mouse, keyboard and finger in a real browser."""

import pytest
import torch

from tests.browser import resize, tap
from tests.model.heads.page_driver import L1H0, MAPS, WRITTEN, head_name, shown


def test_every_selected_head_shows_its_weights(page):
    page = page()
    assert page.texts("h1, title") == ["A title", "A title"]
    assert page.weights() == shown(MAPS[0, 0, 4].tolist())  # at first: the last token in the first head
    for layer in range(2):
        for head in range(3):
            page.select(layer, head)
            for t in (2, 4):
                page.point(page.token(t))
                assert page.weights() == shown(MAPS[layer, head, t].tolist()), (layer, head, t)
            assert page.texts(".name") == [head_name(layer, head)] * 2
            assert page.attributes("[aria-pressed=true]", "title") == [head_name(layer, head)]


def test_select_elements_choose_heads_and_the_mean_of_a_layer(page):
    page = page()
    page.find("#layer").send_keys("1")
    assert page.weights() == shown(L1H0[4])
    page.find("#head").send_keys("mean of all")
    assert page.weights() == shown([1.5 / 3, 0.25 / 3, 0.125 / 3, 0.0, 1.125 / 3])
    assert page.texts(".name") == ["L1, mean of all heads"] * 2
    page.select(0, 3)
    assert page.weights() == shown([0.5, 0, 0, 0, 0.5])
    assert [page.find(name).get_attribute("value") for name in ("#layer", "#head")] == ["0", "3"]


def test_pointing_at_a_token_shows_its_weights_and_the_next_tokens(page):
    page = page()
    page.select(1, 0)
    assert page.texts(".token") == ["def", "·f", "(", "↵\n→x", ")"]
    page.point(page.token(2))
    assert page.texts("#largest > span") == ["0def", "", "0.500", "2(", "", "0.375", "1·f", "", "0.125"]
    assert page.texts("code.query") == ["2("] * 3 and page.texts(".token.later") == ["↵\n→x", ")"]
    colors = [(style or "").split(";")[0] for style in page.attributes(".token", "style")]
    assert colors[0] == "background-color: rgb({}, {}, {})".format(
        *page.color("--high")
    )  # the largest weight of the row
    assert len(set(colors[:3])) == 3 and not any(colors[3:])
    assert page.texts("#next > span") == [
        ")",
        "",
        "50.0 %",
        "↵→x",
        "",
        "31.3 %",
        "*",
        "",
        "< 0.1 %",
        "all others",
        "",
        "18.7 %",
    ]
    assert page.texts("#next .actual:not(.track)") == ["↵→x", "31.3 %"]
    assert page.texts("#follows") == ["In the text follows ↵→x, marked above."]
    assert [style[:12] for style in page.attributes("#next i", "style")] == [
        "width: 50%;",
        "width: 31.25",
        "width: 0.04%",
        "width: 18.71",
    ]
    page.point(page.token(0))
    assert page.texts("#next > span") == ["·g", "", "50.0 %", "↵", "", "25.0 %", "all others", "", "25.0 %"]
    assert page.texts("#next .actual") == [] and page.texts("#follows") == ["In the text follows ·f, not among these."]
    page.point(page.token(3))
    assert page.texts("#next > span") == [",", "", "100.0 %"]  # no probability is left for others
    page.point(page.token(4))
    assert page.texts("#next > span")[2] == "not a number" and page.texts("#follows") == ["The text ends here."]


def test_a_click_pins_a_token_while_the_pointer_moves(page):
    page = page()
    page.select(1, 0)
    page.token(3).click()
    page.point(page.token(2))
    assert page.weights() == shown(L1H0[3]) and page.texts("output") == ["3↵→x attends to 2( with weight 0.625"] * 2
    page.point_at_cell(4, 0)
    assert page.weights() == shown(L1H0[3]) and page.texts("output") == ["4) attends to 0def with weight 0.500"] * 2
    page.press("ESCAPE")
    for clicked, pointed, row in [
        ((), 1, 1),
        ((3, 1), 3, 1),
        ((1,), 3, 3),
    ]:  # free; pinned, then pinned elsewhere; unpinned
        for t in clicked:
            page.token(t).click()
        page.point(page.token(pointed))
        assert page.weights() == shown(L1H0[row])


def test_a_cell_of_the_matrix_shows_query_key_weight_and_its_row(page):
    page = page()
    page.select(1, 0)
    for row, column, later in [(2, 1, ""), (4, 4, ""), (0, 0, ""), (1, 4, ", which comes later,")]:
        page.point_at_cell(row, column)
        message = f"{row}{WRITTEN[row]} attends to {column}{WRITTEN[column]}{later} with {shown(L1H0[row])[column]}"
        assert page.texts("output") == [message] * 2
        assert page.weights() == shown(L1H0[row])
        assert page.attributes("#row", "style") == [f"top: {20 * row}%; height: 20%;"]
        assert page.attributes("#cell", "style") == [
            f"top: {20 * row}%; left: {20 * column}%; height: 20%; width: 20%;"
        ]
        assert page.texts("#rows .on") == [WRITTEN[row]] and page.texts("#columns .on") == [WRITTEN[column]]
    canvas, row = (page.find(name).rect for name in ("#canvas", "#row"))
    assert abs(row["y"] - canvas["y"] - canvas["height"] / 5) < 1 and abs(row["height"] - canvas["height"] / 5) < 1


def test_everything_can_be_reached_by_keyboard(page):
    page = page()
    page.press(
        "TAB", "TAB", "TAB", "ARROW_DOWN", "ARROW_DOWN", "ARROW_RIGHT", "ARROW_LEFT"
    )  # past the selects, among the heads
    assert page.texts(".name") == ["L1H0"] * 2
    page.press("TAB", "ARROW_UP", "ARROW_LEFT", "ARROW_LEFT")
    assert page.texts("output") == ["3↵→x attends to 2( with weight 0.625"] * 2 and page.weights() == shown(L1H0[3])
    page.press("TAB", "ARROW_LEFT", "ARROW_RIGHT", "ARROW_RIGHT")  # from the token of the cell
    assert page.texts("code.query") == ["3↵→x"] * 3 and page.weights() == shown(L1H0[3])
    page.press("ENTER", "HOME", "ARROW_LEFT")
    assert page.weights() == shown(L1H0[3]) and page.texts("output") == ["3↵→x attends to 0def with weight 0.125"] * 2
    page.press("ESCAPE", "END")
    assert page.weights() == shown(L1H0[4])


@pytest.mark.parametrize("width", [375, 900, 1280])
@pytest.mark.parametrize("n", [20, 130])  # with labels along the matrix, and with a separate column for the text
def test_no_width_makes_the_page_scroll_sideways(page, driver, width, n):
    tokens = ["x" * 90, *[" word"] * (n - 1)]
    page = page(maps=torch.eye(n).expand(2, 12, n, n), tokens=tokens, after=[[("y" * 90, 0.5)]] * n, title="z" * 200)
    resize(driver, width, 800, touch=width == 375)
    page.js("pointAtToken(0)")
    assert page.js("return [innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]
    assert (
        page.js("return [...document.querySelectorAll('section, #text')].filter((e) => e.scrollWidth > e.clientWidth)")
        == []
    )


def test_a_tap_pins_a_token(page, driver):
    page = page()
    resize(driver, 375, 800, touch=True)
    page.select(1, 0)
    for t in (2, 3):
        tap(driver, page.token(t))
        assert page.weights() == shown(L1H0[t])
    assert page.find("#pinned").is_displayed()
