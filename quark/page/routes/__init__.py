"""What the page's addresses answer, out of any opened backend; nothing here knows of HTTP."""
