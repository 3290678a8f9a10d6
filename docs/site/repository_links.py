"""Makes pages of the site link to files of the repository outside `docs/`, as they do on GitHub.

Files that a page links to, such as `../benchmarks/results/scale_million_cpu.md`, become part of the site below
`repository/`, and the links point there. Links of these Markdown files are rewritten and checked like all others.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

BELOW = "repository"
# The target of [text](target) and ![text](target), without its anchor. No target of ours has a space or a parenthesis.
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside `docs/` that pages link to, and those that these link to."""
    docs, root = Path(config.docs_dir), Path(config.docs_dir).parent
    seen, queue = set(), [Path(file.abs_src_path) for file in files.documentation_pages()]
    while queue:
        page = queue.pop()
        for _, target in LINK.findall(page.read_text()):
            path = Path(posixpath.normpath(page.parent / target))
            if path in seen or path.is_relative_to(docs) or not path.is_file():
                continue
            seen.add(path)
            if path.suffix == ".md":
                queue.append(path)
            name = posixpath.join(BELOW, path.relative_to(root).as_posix())
            files.append(
                File.generated(
                    config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV
                )
            )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave `docs/` to the copies, and links of a copy back."""
    docs, root = Path(config.docs_dir), Path(config.docs_dir).parent
    source = Path(page.file.abs_src_path)
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = Path(posixpath.normpath(source.parent / match[2]))
        outside = path.is_relative_to(root) and not path.is_relative_to(docs)
        if not outside and source.is_relative_to(docs):
            return match[0]
        target = (
            posixpath.join(BELOW, path.relative_to(root))
            if outside
            else path.relative_to(docs).as_posix()
        )
        return match[1] + posixpath.relpath(target, here or ".")

    return LINK.sub(moved, markdown)
