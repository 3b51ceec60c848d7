"""Values of a run -> tables, drawings and one HTML file. Callers read the store and pass records in.

A `RunSummary` holds all that is known of a run; every part may be missing, and a page says so. Its tables are the same
on a terminal, in Markdown and on a page. Numbers say how they came about: measured, simulated, predicted or analytic.
A page is a `Page` of sections in one template; it loads nothing and runs nothing.
"""
