"""The answers of the page's addresses, from any open backend, without HTTP."""
