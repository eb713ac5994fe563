"""Reports: a page that compares training runs, and the parts of the README that are made from bench/results.

__main__.py     python -m bench.report: the page; runs.py and page_tables.py read its input
page.py         fills page.html, page.css and page.js
sweep.py        writes the page at the end of a sweep
readme.py       python -m bench.report.readme: the tables of the README
"""
