"""Parts of `page.py`: the page in a real browser, live and beside the pages of other tools."""
