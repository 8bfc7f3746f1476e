"""The report in a real browser: Chromium, headless, one session for all tests."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hand_made import HOSTILE, hand_made

from surefoot.certificate import Certificate, Row
from surefoot.report import WhatIf, write_report

PLAIN = [f"stage.{k // 4}.{k}" for k in range(12)] + ["head"]
MANY = [f"body.{k // 30}.{k // 6}.{k}" for k in range(180)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = "Chromium and chromedriver are needed (on Debian: apt install chromium chromium-driver)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    yield session
    session.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[str, Certificate]:
    certificate = hand_made(PLAIN, infinite=True)
    return write_report(folder / "plain.html", [("plain", certificate)]).as_uri(), certificate


@pytest.fixture(scope="module")
def hostile(folder: Path) -> str:
    certificates = [(name, hand_made([*HOSTILE, *PLAIN])) for name in HOSTILE]
    return write_report(folder / "hostile.html", certificates, title=HOSTILE[0]).as_uri()


@pytest.fixture(scope="module")
def many(folder: Path) -> str:
    return write_report(folder / "many.html", [("many", hand_made(MANY, scalar=True))]).as_uri()


def open_page(browser: Any, address: str, width: int = 1280, theme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wishes = {
        "prefers-color-scheme": theme,
        "prefers-reduced-motion": "reduce",
    }  # nothing glides while it is measured
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get(address)


def positions(browser: Any) -> list[int]:
    """The operations that are shown, by their place in the order of computation."""
    script = """return [...document.querySelectorAll('table.layers tbody tr.op')]
        .filter(line => line.offsetParent !== null).map(line => Number(line.cells[0].textContent))"""
    return list(browser.execute_script(script))


def click(browser: Any, selector: str) -> None:
    from selenium.webdriver.common.by import By

    element = browser.find_element(By.CSS_SELECTOR, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    element.click()


def natural(text: str) -> list[tuple[int, int, str]]:
    """Numbers in a text count as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]


COLUMNS = {
    "position": lambda k, row: k,
    "path": lambda k, row: natural(row.module),
    "operation": lambda k, row: row.operation,
    "shape": lambda k, row: row.shape[0] * row.shape[1],
    "slope": lambda k, row: -float("inf") if row.slope is None else row.slope.log2,
    "curvature": lambda k, row: row.curvature.log2,
    "bound": lambda k, row: row.bound.log2,
    "lipschitz": lambda k, row: row.lipschitz.log2,
    "smoothness": lambda k, row: row.smoothness.log2,
    "share": lambda k, row: row.share,
}

SORTED = """return [...document.querySelectorAll('.layers thead th')].filter(head => head.ariaSort !== 'none')
    .map(head => [head.firstElementChild.dataset.sort, head.ariaSort])"""


def test_every_column_sorts_both_ways(browser: Any, plain: tuple[str, Certificate]) -> None:
    address, certificate = plain
    open_page(browser, address)
    rows: dict[int, Row] = dict(enumerate(certificate.rows, start=1))
    assert positions(browser) == list(rows)
    buttons = "return [...document.querySelectorAll('.layers [data-sort]')].map(button => button.dataset.sort)"
    assert browser.execute_script(buttons) == list(COLUMNS)
    for column, key in COLUMNS.items():
        orders = set()
        for _ in range(2):
            click(browser, f".layers [data-sort={column}]")
            heads = browser.execute_script(SORTED)
            found = positions(browser)
            keys = [key(k, rows[k]) for k in found]
            assert [name for name, _ in heads] == [column]
            assert sorted(found) == list(rows)
            assert keys == sorted(keys, reverse=heads[0][1] == "descending"), column
            orders.add(heads[0][1])
        assert orders == {"ascending", "descending"}


def test_sorting_by_keyboard_and_back_to_the_tree(browser: Any, plain: tuple[str, Certificate]) -> None:
    from selenium.webdriver.common.keys import Keys

    address, _ = plain
    open_page(browser, address)
    browser.execute_script("document.querySelector('table.layers button[data-sort=lipschitz]').focus()")
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert positions(browser) != list(range(1, 14))
    shown = "return [...document.querySelectorAll('tr.group')].filter(line => line.offsetParent !== null).length"
    assert browser.execute_script(shown) == 0  # a sorted table is no tree
    click(browser, "table.layers button[data-sort=position]")
    assert positions(browser) == list(range(1, 14))
    assert browser.execute_script(shown) == 4


def test_modules_fold_and_unfold(browser: Any, plain: tuple[str, Certificate], many: str) -> None:
    open_page(browser, plain[0])
    click(browser, "tr.depth-1.group .fold")
    assert positions(browser) == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    click(browser, "[data-fold=all]")
    assert positions(browser) == [13]
    click(browser, "[data-fold=none]")
    assert positions(browser) == list(range(1, 14))
    open_page(browser, many)
    assert positions(browser) == []  # long tables begin as an overview
    click(browser, "[data-fold=none]")
    assert positions(browser) == list(range(1, 181))


def test_the_filter_keeps_what_matches(browser: Any, plain: tuple[str, Certificate]) -> None:
    from selenium.webdriver.common.by import By

    address, certificate = plain
    open_page(browser, address)
    box = browser.find_element(By.CSS_SELECTOR, ".tools input")
    box.send_keys("SoftPlus")
    expected = [k for k, row in enumerate(certificate.rows, 1) if row.operation == "softplus"]
    assert positions(browser) == expected
    assert browser.find_element(By.CSS_SELECTOR, ".count").text == f"{len(expected)} of 13 operations"
    box.clear()
    box.send_keys("stage.2")
    assert positions(browser) == [9, 10, 11, 12]
    box.clear()
    box.send_keys("nothing like it")
    assert positions(browser) == []


def test_the_theme_follows_the_system_until_it_is_chosen(browser: Any, plain: tuple[str, Certificate]) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    address, _ = plain
    ground = "return getComputedStyle(document.body).backgroundColor"
    open_page(browser, address, theme="light")
    light = browser.execute_script(ground)
    open_page(browser, address, theme="dark")
    dark = browser.execute_script(ground)
    assert light != dark
    click(browser, "#theme")
    assert browser.execute_script(ground) == light

    def remembered(session: Any) -> bool:
        """A page that is opened anew reads what the last one wrote, which reaches the disk a moment later."""
        session.get(address)
        return bool(session.execute_script(ground) == light)

    WebDriverWait(browser, 10).until(remembered)
    click(browser, "#theme")
    assert browser.execute_script(ground) == dark
    browser.execute_script("localStorage.clear()")


def test_without_storage_the_theme_still_changes(browser: Any, plain: tuple[str, Certificate]) -> None:
    forbidden = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('forbidden'); } })"
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": forbidden})
    try:
        open_page(browser, plain[0])
        before = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        click(browser, "#theme")
        assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != before
        assert browser.get_log("browser") == []
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_charts_show_values_under_the_pointer_and_the_keys(browser: Any, plain: tuple[str, Certificate]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    from surefoot.certificate.numbers import upper

    address, certificate = plain
    open_page(browser, address)
    plot, tip = (browser.find_element(By.CSS_SELECTOR, f".curves .{part}") for part in ("plot", "tip"))
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].focus()", plot)
    plot.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    third = certificate.rows[2]
    assert tip.text.splitlines() == [
        third.module,
        f"{third.operation}, {third.shape[0]}×{third.shape[1]}",
        f"m = {upper(third.bound)}",
        f"ℓ = {upper(third.lipschitz)}",
        f"L = {upper(third.smoothness)}",
    ]
    plot.send_keys(Keys.END)
    assert tip.text.splitlines()[0] == "head"
    plot.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    matrix = browser.find_element(By.CSS_SELECTOR, ".heat .plot")
    size = matrix.size["width"]
    cell = size / len(PLAIN)
    away = (round(4.5 * cell - size / 2), round(2.5 * cell - size / 2))
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", matrix)
    ActionChains(browser).move_to_element_with_offset(matrix, *away).perform()
    shown = browser.find_element(By.CSS_SELECTOR, ".heat .tip").text.splitlines()
    assert shown == [
        upper(certificate.block_smoothness[2, 4]),
        f"{PLAIN[2]} · {certificate.rows[2].operation}",
        f"with {PLAIN[4]} · {certificate.rows[4].operation}",
    ]


def test_the_architecture_is_walked_with_the_keys(browser: Any, plain: tuple[str, Certificate]) -> None:
    from selenium.webdriver.common.keys import Keys

    from surefoot.certificate.numbers import upper

    address, certificate = plain
    open_page(browser, address)
    facts = "return [...document.querySelectorAll('.walked dd')].map(each => each.textContent)"
    tree = "[role=tree] [role=treeitem]"
    browser.execute_script(f"document.querySelector('{tree}').focus()")

    def walk(*keys: str) -> list[str]:
        for key in keys:
            browser.switch_to.active_element.send_keys(key)
        return list(browser.execute_script(facts))

    assert walk()[0] == "stage"
    assert walk(Keys.ARROW_DOWN)[0] == "stage.0"
    first = walk(Keys.ARROW_DOWN)
    row = certificate.rows[0]
    assert first[:2] == [row.module, row.operation]
    assert first[3:6] == [upper(row.bound), upper(row.lipschitz), upper(row.smoothness)]
    assert walk(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)[0] == "stage.0.2"
    assert walk(Keys.ARROW_UP)[0] == "stage.0"
    assert walk(Keys.ARROW_RIGHT)[0] == "stage.1"
    assert walk(Keys.END)[0] == "head"
    assert walk(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)[0] == "head"
    selected = (
        f"return [...document.querySelectorAll('{tree}[aria-selected=true]')].map(e => [e.ariaLabel, e.tabIndex])"
    )
    ((label, index),) = browser.execute_script(selected)
    assert label.startswith("head, ")
    assert index == 0
    assert browser.execute_script(f"return document.querySelectorAll('{tree}[tabindex=\"0\"]').length") == 1


def test_the_slider_shows_the_certificate_of_its_radius(browser: Any, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    from surefoot.certificate.numbers import upper

    others = [(2.0**k, hand_made([f"a.{j}" for j in range(3 + k)], scalar=True)) for k in range(4)]
    found = WhatIf(others, [("other", others[0][1])])
    address = write_report(folder / "radii.html", [("r", others[2][1])], what_if={"r": found}).as_uri()
    open_page(browser, address)
    browser.execute_script("document.querySelector('input[type=range]').focus()")
    shown = "return [...document.querySelectorAll('.radii output, .radii dd')].map(each => each.textContent)"
    assert browser.execute_script(shown)[0] == "4"
    browser.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    radius, smoothness, lipschitz, _ = browser.execute_script(shown)
    assert [radius, smoothness, lipschitz] == ["2", upper(others[1][1].smoothness), upper(others[1][1].lipschitz)]
    spoken = "return document.querySelector('input[type=range]').getAttribute('aria-valuetext')"
    assert browser.execute_script(spoken) == "2"
    browser.switch_to.active_element.send_keys(Keys.HOME)
    assert browser.execute_script(shown)[0] == "1"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_drawn_fits_at_any_width(browser: Any, plain: tuple[str, Certificate], theme: str) -> None:
    for width in (1280, 390):
        open_page(browser, plain[0], width=width, theme=theme)
        outside = """return [...document.querySelectorAll('figure, .verdict, .figures > div')].filter(each => {
            const box = each.getBoundingClientRect();
            return box.left < 0 || box.right > window.innerWidth + 0.5; }).length"""
        assert browser.execute_script(outside) == 0
        wide, room = browser.execute_script(
            "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
        )
        assert wide <= room <= width
        boxes = "return [...document.querySelectorAll('.walk text')].filter(e => e.getClientRects().length).length"
        assert browser.execute_script(boxes) >= (8 if width > 1000 else 2)


def test_on_a_phone_nothing_scrolls_sideways_but_tables(
    browser: Any, plain: tuple[str, Certificate], hostile: str, many: str
) -> None:
    for address in (plain[0], hostile, many):
        open_page(browser, address, width=360)
        width = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert width == [360, 360]
        table = browser.execute_script(
            "const t = document.querySelector('.tall'); return t.scrollWidth > t.clientWidth"
        )
        assert table


def test_hostile_names_do_not_run_and_nothing_is_requested(browser: Any, hostile: str) -> None:
    from selenium.common.exceptions import NoAlertPresentException

    open_page(browser, hostile)
    browser.get(hostile)
    browser.execute_script(
        "document.querySelectorAll('.plot').forEach(plot => { plot.focus(); plot.blur(); plot.focus(); })"
    )
    with pytest.raises(NoAlertPresentException):
        browser.switch_to.alert  # noqa: B018  looking is what raises
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.title") == HOSTILE[0]
    assert browser.execute_script("return document.querySelectorAll('img, iframe, object').length") == 0
    resources = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in resources if not name.startswith("data:")] == []


def test_the_policy_stops_what_is_put_in_later(browser: Any, plain: tuple[str, Certificate]) -> None:
    """The policy is in force: neither a script nor an image from elsewhere gets through."""
    open_page(browser, plain[0])
    browser.execute_script("""
        const script = document.createElement('script'); script.textContent = 'window.ran = true';
        document.body.append(script);
        const image = document.createElement('img'); image.src = 'http://localhost:9/x.png';
        document.body.append(image);
    """)
    assert browser.execute_script("return window.ran === undefined")
    assert sum("Content Security Policy" in entry["message"] for entry in browser.get_log("browser")) >= 2


def test_no_error_on_any_page(browser: Any, plain: tuple[str, Certificate], hostile: str, many: str) -> None:
    for address in (plain[0], hostile, many):
        open_page(browser, address)
        assert browser.get_log("browser") == []
