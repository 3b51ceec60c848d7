"""Any multimodal model of transformers without a file per family: read from its classes, proven on a shrunk copy.

`structure.py` says what a model is made of, `exact.py` whether generic pipeline stages (`stage.py`, `entry.py`) train a
shrunk copy of it as transformers does. `check.py` puts both together for `dflop model check`. Training such a model is
not there yet: plans and jobs take the families of `dflop/models/families/` only.
"""
