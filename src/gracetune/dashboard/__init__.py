"""Show runs in a browser: read their logs, serve the page `gracetune dash`, write reports."""
