"""The course as its reader meets it: JupyterLab in a real browser. A nightly tier runs this; a push does not."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request

import nbformat
import psutil
import pytest

from refimpl import catalog

pytestmark = pytest.mark.nightly
SECONDS = 300  # for one page to run, on shared cores
DRAWN = ".jp-RenderedMarkdown"  # a cell's source is there, too, and hidden
ANSWER = """
import torch
from exercises import where_the_memory_goes as page
def evaluate(model, tokens, targets):
    with torch.no_grad():
        return model(tokens, targets)
"""
LAUNCH = """
import time
from refimpl.comm import launch
def rest(comm):
    time.sleep(300)
print("begun", flush=True)
launch(rest, 3)
"""
# How many colours a picture has: one that is blank has one.
COLOURS = """image => { const canvas = document.createElement('canvas');
canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
const context = canvas.getContext('2d'); context.drawImage(image, 0, 0);
return new Set(new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size }"""


def run_all(tab):
    """Run all cells from the menu, and wait until none is waiting. Returns what was said of errors."""
    tab.get_by_role("menuitem", name="Run", exact=True).click()
    tab.get_by_text("Run All Cells", exact=True).first.click()
    tab.wait_for_timeout(2000)
    tab.wait_for_function("![...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))",
                          timeout=SECONDS * 1000)
    tab.wait_for_timeout(500)
    return tab.evaluate("[...document.querySelectorAll('[data-mime-type=\"application/vnd.jupyter.error\"],"
                        "[data-mime-type=\"application/vnd.jupyter.stderr\"]')].map(e => e.textContent.slice(0, 300))")


def test_the_start_page_is_drawn_wide_and_narrow_and_says_what_there_is(opened):
    tab = opened("INDEX.ipynb")
    for words in ("exercises and blanks solved", "One GPU, tonight", "Is it reserved, not allocated?"):
        tab.locator(DRAWN, has_text=words).first.wait_for(timeout=SECONDS * 1000)
    tab.wait_for_timeout(5000)  # the kernel has told what it is
    assert tab.locator(".jp-mod-dirty").count() == 0, "JupyterLab would save the page over what a grader writes"
    for width in (1400, 500):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.wait_for_timeout(500)
        wider = tab.evaluate(
            "[...document.querySelectorAll('.jp-RenderedMarkdown p, .jp-RenderedMarkdown li')].filter("
            "e => e.scrollWidth > e.clientWidth + 1 || e.clientWidth > window.innerWidth).length")
        assert wider == 0, width


def test_every_link_of_the_start_page_and_of_the_pages_leads_to_a_file(checkout, lab):
    """Asked of the server, as the browser asks it; links of the start page are resolved from learn/."""
    token, base = lab.partition("token=")[2].split()[0], lab.partition("/lab/")[0]
    links = set()
    for page in sorted((checkout / "learn").glob("*.ipynb")):
        for cell in nbformat.read(page, 4).cells:
            if cell.cell_type == "markdown":
                text = re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.DOTALL)  # f[k](x) is no link
                found = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
                links |= {link for link in found if not link.startswith(("http", "attachment:"))}
    assert len(links) >= 37 + 3
    lost = []
    for link in sorted(links):
        path = urllib.parse.quote((checkout / "learn" / link).resolve().relative_to(checkout).as_posix())
        try:
            urllib.request.urlopen(f"{base}/api/contents/{path}?content=0&token={token}").close()
        except urllib.error.HTTPError as error:
            lost.append((link, error.code))
    assert lost == []


def test_a_link_of_the_start_page_opens_its_page(opened):
    tab = opened("INDEX.ipynb")
    page = catalog.page("fragmentation")
    tab.get_by_role("link", name=page.name).first.click()
    tab.wait_for_timeout(5000)
    assert any(page.filename in each.url for each in tab.context.pages)


@pytest.mark.parametrize("slug", ["which_layers_to_recompute", "masks_in_tiles", "fragmentation"])
def test_a_page_runs_from_the_menu_without_an_error_and_its_figures_are_not_blank(checkout, opened, slug):
    (copy,) = (checkout / "learn").glob(f"*_{slug}.ipynb")
    tab = opened(copy.name)
    assert run_all(tab) == []
    pictures = tab.query_selector_all(".jp-OutputArea img")
    assert pictures and all(picture.evaluate(COLOURS) > 5 for picture in pictures)


def test_the_stop_button_during_a_launch_leaves_no_process(checkout, opened):
    write(checkout / "learn" / "stopped.ipynb", LAUNCH)
    tab = opened("stopped.ipynb")
    tab.get_by_role("menuitem", name="Run", exact=True).click()
    tab.get_by_text("Run All Cells", exact=True).first.click()
    tab.wait_for_selector(".jp-OutputArea :text('begun')", timeout=SECONDS * 1000)
    for _ in range(SECONDS):
        if len(ranks(checkout)) >= 3:
            break
        tab.wait_for_timeout(1000)
    assert len(ranks(checkout)) >= 3
    tab.get_by_role("menuitem", name="Kernel", exact=True).click()
    tab.get_by_text("Interrupt Kernel", exact=True).first.click()
    tab.wait_for_selector(".jp-OutputArea :text('KeyboardInterrupt')", timeout=SECONDS * 1000)
    for _ in range(20):
        if not ranks(checkout):
            break
        tab.wait_for_timeout(500)
    assert ranks(checkout) == []


def ranks(checkout):
    """The ranks of a kernel of the checkout's learn/: children of the process that forks them, which stays."""
    found = []
    for process in psutil.process_iter():
        try:
            if "ipykernel" in " ".join(process.cmdline()) and process.cwd() == str(checkout / "learn"):
                found += [rank for forks in process.children() for rank in forks.children(recursive=True)
                          if rank.status() != psutil.STATUS_ZOMBIE]
        except psutil.Error:
            continue
    return found


def test_an_exercise_answered_in_place_ticks_the_start_page(checkout, opened):
    wrong, right = ANSWER + "page.first(lambda *args: 0)", ANSWER + "page.second(evaluate)"
    write(checkout / "learn" / "answered.ipynb", wrong, right)
    tab = opened("answered.ipynb")
    assert run_all(tab) == []
    assert json.loads((checkout / "learn" / "progress.json").read_text()) == {"where_the_memory_goes": ["second"]}
    tab = opened("INDEX.ipynb")
    for words in (re.compile(r"1 of \d+ exercises and blanks solved"), "☐☑☐"):
        tab.locator(DRAWN, has_text=words).first.wait_for(timeout=SECONDS * 1000)


def write(path, *sources):
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(each) for each in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
