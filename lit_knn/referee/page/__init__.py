"""Pages of results for readers: Markdown, self-contained HTML and pictures, made from the table of results alone."""

from lit_knn.referee.page.write import write_page

__all__ = ["write_page"]
