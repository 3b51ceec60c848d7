"""Datasets on disk -> what every sample costs every module, the order of training, decoded media.

    row --conversation--> turns + media refs --headers--> sizes --family's rules--> Placement --+
                                                                                               +--> SampleShape, or
                             chat template + tokenizer, many samples in one call ---------------+    QuarantinedSample

A profile decodes nothing but what headers leave open, so a terabyte of video takes minutes.

- Rows: `formats/` give them by number without loading a file. What a row means is decided for all formats in
  `conversation.py`. `mixture.py` numbers the rows of many files; its weights reach the order of training
  (`sample_order.py`), the planner's batches and every quantile.
- Media: `headers.py` reads sizes, `packets.py` counts where a header lies, `rotation.py` finds turned videos,
  `header_cache.py` keeps what was read. Training decodes with `load_media.py` and `decode.py`.
- Text: `chat.py` renders the tokenizer's own template, `tokens.py` makes ids of it, in the profile as in training.
- Profiles: `shapes.py` makes one of a sample, `dataset_profile.py` of a dataset, `size_table.py` of a table of sizes
  without media. `distribution.py` sums them up and compares two.

jinja2 is imported because chat templates are Jinja text: any other reader of them would be wrong somewhere.
"""
