"""A `Plan` -> seats and process groups; tensor parallelism of Hugging Face's own modules.

`topology.py` says who sits where and opens connections in an order on which all agree, `tensor.py` cuts the
matrices that `models/splits.py` names (Megatron's two all-reduces per layer and direction) and the head by rows.
`stages.py` states the order in which a rank's layers are cut, shared, filled and set to run, for training and probes.
Between grids of different tensor-parallel degree each rank takes from one rank of the other group and gives to those
that take from it (`peers_of`): ranks of a group hold equal activations.
"""
