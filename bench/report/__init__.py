"""Reports: a page that compares training runs, and the tables of the README."""
