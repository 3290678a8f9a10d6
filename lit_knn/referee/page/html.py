"""Write a page as HTML in one file, which loads nothing and needs no script."""

import base64
from collections.abc import Sequence
from html import escape

from lit_knn.referee.page.blocks import Block, Cell, Code, Details, Heading, Items, Paragraph, Picture, Table

STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --faint: #666; --line: #d9d9d9; --back: #fff; --band: #f5f5f5;
  --front: #e1f0fa; --link: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e4e4; --faint: #a0a0a0; --line: #444; --back: #161616;
  --band: #202020; --front: #163a52; --link: #56b4e9; } }
body { margin: 0 auto; max-width: 80rem; padding: 1rem 1.2rem 4rem; color: var(--text); background: var(--back);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); } h3 { margin-top: 2rem; }
p, ul { max-width: 50rem; } ul { padding-left: 1.2rem; }
img { display: block; width: 100%; max-width: 70rem; height: auto; background: #fff; border-radius: 4px;
  margin: 1rem 0; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.55rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
th { background: var(--band); vertical-align: bottom; } th.sortable { cursor: pointer; }
td { white-space: nowrap; }
.left { text-align: left; } td.left { white-space: normal; min-width: 9rem; }
td small { display: block; font-size: 0.78em; color: var(--faint); }
td.strong { font-weight: 600; background: var(--front); } td.strong small { font-weight: 400; }
tbody tr:hover td { background: var(--band); } tbody tr:hover td.strong { background: var(--front); }
details { margin: 0.6rem 0; } summary { cursor: pointer; color: var(--link); }
pre { overflow-x: auto; padding: 0.6rem 0.8rem; background: var(--band); font-size: 0.8rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
"""
# A click on the head of a column sorts the table by it, a second one the other way around.
SCRIPT = """
for (const head of document.querySelectorAll("th")) {
  head.classList.add("sortable");
  head.addEventListener("click", () => {
    const rows = head.closest("table").tBodies[0], at = head.cellIndex, down = head.dataset.down !== "1";
    head.dataset.down = down ? "1" : "0";
    const key = row => row.cells[at].dataset.key ?? row.cells[at].textContent;
    const compare = (a, b) => isNaN(a) || isNaN(b) ? (isNaN(a) - isNaN(b)) || String(a).localeCompare(b) : a - b;
    rows.append(...[...rows.rows].sort((a, b) => (down ? 1 : -1) * compare(key(a), key(b))));
  });
}
"""


def html(blocks: Sequence[Block]) -> str:
    """Return the page as text. Its title is the first heading."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "")
    body = "\n".join(map(_block, blocks))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _block(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Items(items):
            inside = "\n".join(f"<li><strong>{escape(name)}</strong> {escape(text)}</li>" for name, text in items)
            return f"<ul>\n{inside}\n</ul>"
        case Table():
            return _table(block)
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Picture(alt, _, svg):
            # As data of an image, the identifiers inside one picture do not meet those of another.
            data = base64.b64encode(svg).decode("ascii")
            return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'
        case Details(summary, blocks):
            inside = "\n".join(map(_block, blocks))
            return f"<details>\n<summary>{escape(summary)}</summary>\n{inside}\n</details>"


def _table(table: Table) -> str:
    left = [name in table.left for name in table.header]
    head = "".join(
        f"<th{_class(is_left)}>{escape(name)}</th>" for name, is_left in zip(table.header, left, strict=True)
    )
    rows = "\n".join(
        f"<tr>{''.join(_cell(cell, is_left) for cell, is_left in zip(row, left, strict=True))}</tr>"
        for row in table.rows
    )
    inside = f"<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="scroll">\n<table>\n{inside}\n</table>\n</div>'


def _cell(cell: Cell, left: bool) -> str:
    key = "" if cell.key is None else f' data-key="{cell.key:g}"'
    small = f"<small>{escape(cell.small)}</small>" if cell.small else ""
    return f"<td{_class(left, cell.strong)}{key}>{escape(cell.text)}{small}</td>"


def _class(left: bool, strong: bool = False) -> str:
    names = " ".join([*(["left"] if left else []), *(["strong"] if strong else [])])
    return f' class="{names}"' if names else ""
