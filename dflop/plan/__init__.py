"""Cost tables, sampled batches and a cluster -> ranked `Plan`s.

`space.py` has the `Problem` and the `SearchSpace`. For each number of microbatches grids of ranks are made for all
modules, for the LLM with some encoders and for each alone (`grid_search.py`, `chain.py`), valued by a closed formula
(`columns.py`), and a mixed-integer program covers the modules with those that bounds leave (`program.py`). Memory is a
hard constraint of all (`memory.py`), for the largest samples of the whole profile, too (`worst.py`). `rank.py`
schedules and simulates the nominees on sampled batches, under the cost model's own residual noise. `verdict.py` prefers
a colocated plan within 5 %, and says when nothing is gained over the best uniform data-blind plan, which is always
among those compared (`uniform.py`).

`limits.py` weighs what a plan uses of every limit; 90 % counts as binding. Whether more of something would help is
not guessed: other circumstances are other `Problem`s, and the search is asked again. cvxpy is imported in `program.py`
alone, when something is solved.
"""
