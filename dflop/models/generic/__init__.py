"""Any multimodal model of transformers without a file per family: read from its classes, proven on a shrunk copy.

`structure.py` says what a model is made of, `tokens.py` and `lengths.py` what its media become;
`facts.py` keeps both, so that `family.py` plans the model without torch. `llm_stage.py` and `items.py` train it;
`exact.py` says whether they train a shrunk copy as transformers does, on items of `processed_items.py` or
`random_items.py`; `check.py` says all of it for `dflop model check`;
`exactness.py` has the result that it keeps.
"""
