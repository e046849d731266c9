"""An Explanation as files: a page that needs no network, a picture, and JSON."""

import base64
import io
import json
from html import escape
from pathlib import Path
from urllib.parse import quote

from ..common.ledger import human
from .answers import together

STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{padding:.15em .8em;text-align:left;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}tr:nth-child(even) td
{background:#f5f5f5}code{font-size:90%}img{max-width:100%}.quiet{color:#666}h2{margin-top:1.6em}"""

APART = "<tr><th colspan=\"6\">on several devices, each with such a model</th></tr>"


def write(explanation, folder):
    """Write explain.json, and, if anything was allocated, explain.png, explain.html and timeline.html; yield paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "explain.json"
    path.write_text(json.dumps(explanation.as_dict(), indent=2) + "\n", encoding="utf-8")
    yield path
    if explanation.is_empty:
        return
    picture = io.BytesIO()
    explanation.trace.plot().savefig(picture, format="png", dpi=110)
    path = folder / "explain.png"
    path.write_bytes(picture.getvalue())
    yield path
    timeline = folder / "timeline.html"
    explanation.trace.to_html(timeline, title=f"{Path(explanation.run.name).name}, over time")
    path = folder / "explain.html"
    path.write_text(page(explanation, picture.getvalue(), timeline.name), encoding="utf-8")
    yield path
    yield timeline


def page(explanation, picture, timeline):
    """Return the page as text: the picture is in it, `timeline` is the file beside it."""
    moment, run = explanation.moment, explanation.run
    where = (f"after <code>{escape(moment.operation)}</code> in <code>{escape(moment.module or 'no module')}</code>, "
             f"{escape(moment.phase)}")
    first = "".join(f"<li>{escape(what)}{''.join(f'<br><b>{escape(each)}</b>' for each in changes if each)}</li>"
                    for what, changes in together(explanation.first).items())
    first = f"<h2>What to change first</h2><ol>{first}</ol>" if first else ""
    encoded = base64.b64encode(picture).decode()
    device = escape(str(explanation.trace.device))
    parts = [f"<h1>{escape(Path(run.name).name)}</h1><p>{escape(run.words)}. Peak on {device}: "
             f"<b>{human(moment.ledger.total)}</b>, {where}.</p>{first}",
             f"<img alt=\"Bytes by category at the peak, and after every operation\" "
             f"src=\"data:image/png;base64,{encoded}\">",
             f"<p><a href=\"{escape(quote(timeline))}\">Every tensor, over time</a></p>",
             _section("The ledger at the peak", [(name, nbytes) for name, nbytes in moment.ledger.items()])]
    parts += [_section(f"By {by}", explanation.rows(by)) for by in ("module", "line", "tensor")]
    parts.append(_section("What your script keeps from step to step",
                          [(f"{each}. {each.cure}", each.nbytes) for each in explanation.kept]))
    rest = explanation.arithmetic
    if rest:
        rows = [(rest.terms, rest.expected), *rest.rest, ("all of it: the peak", rest.peak), *rest.beyond]
        parts.append(_section("What the arithmetic leaves out", rows))
    parts.append(_helps(explanation))
    parts += [f"<p class=\"quiet\">Note: {escape(note)}</p>" for note in explanation.notes]
    return (f"<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{escape(Path(run.name).name)}: "
            f"memory</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n")


def _section(title, rows):
    body = "".join(f"<tr><td class=\"n\">{nbytes:,}</td><td class=\"n\">{human(nbytes)}</td>"
                   f"<td>{escape(name)}</td></tr>" for name, nbytes in rows)
    return f"<h2>{escape(title)}</h2><table><tr><th class=\"n\">bytes</th><th></th><th></th></tr>{body}</table>"


def _helps(explanation):
    if not explanation.helps:
        return ""
    head = "<tr><th class=\"n\">saves</th><th></th><th>technique</th><th>costs</th><th>page</th><th>call</th></tr>"
    peak = explanation.moment.ledger.total
    useful = sorted((each for each in explanation.helps if each.saves), key=lambda each: each.ranks)
    first = next((each for each in useful if each.ranks), None)
    body = "".join(
        f"{APART if each is first else ''}<tr><td class=\"n\">{each.words}</td>"
        f"<td class=\"n\">{each.saves / peak:.0%}</td><td>{escape(each.title)}"
        f"{f'<br><span class=quiet>{escape(each.bound)}</span>' if each.bound else ''}</td><td>{escape(each.cost)}</td>"
        f"<td>{each.page}</td><td><code>{escape(each.call)}</code></td></tr>"
        for each in useful)
    nothing = "".join(f"<li>{escape(each.title)}: {escape(each.why)}</li>" for each in explanation.helps
                      if not each.saves)
    return (f"<h2>What would help here, each alone</h2><table>{head}{body}</table><p>Nothing is saved by</p>"
            f"<ul class=\"quiet\">{nothing}</ul>")
