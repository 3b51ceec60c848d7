"""A first configuration, made from a model's own files and a folder of data: `dflop init`."""
