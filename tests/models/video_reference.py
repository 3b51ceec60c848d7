"""Hugging Face's video processors in a separate process: one JSON case per line in, one JSON answer per line out.

The processors need torchvision, which does not load with a CPU torch unless its operators' registration is allowed
to fail; none of them is used here. That must not happen in the tests' own process.

A case has `family`, `options` of the processor, the source's `num_frames`, `fps`, `width`, `height`, and `pixels`:
whether real frames go through the processor, or only the sizes through its rules; or a `folder` with settings, whose
limits are the answer; or `messages`, see `whole_reference.py`. Else the answer has `indices`, `grid` and
`layout` (what the video placeholder becomes: texts, and the lengths of its runs), or `error`.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache

import numpy as np
import torch
import whole_reference
from with_torchvision import import_torchvision


def tokenizer(**named):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", extra_special_tokens=named)


@cache
def processor(family, options):
    """Processor of `family` whose video processor has `options`, a JSON object."""
    import transformers as hf
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    videos = hf.Qwen3VLVideoProcessor if family == "qwen3_vl" else hf.Qwen2VLVideoProcessor
    images, video = Qwen2VLImageProcessor(), videos(do_sample_frames=True, **json.loads(options))
    if family == "qwen2_5_omni_thinker":
        words = tokenizer(
            image_token="<|IMAGE|>", video_token="<|VIDEO|>", audio_token="<|AUDIO|>",
            vision_bos_token="<|vision_bos|>", vision_eos_token="<|vision_eos|>",
            audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
        )  # fmt: skip
        return hf.Qwen2_5OmniProcessor(images, video, hf.WhisperFeatureExtractor(feature_size=128), words)
    whole = {"qwen3_vl": hf.Qwen3VLProcessor, "qwen2_vl": hf.Qwen2VLProcessor}.get(family, hf.Qwen2_5_VLProcessor)
    return whole(images, tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>"), video)


def settings_of(case):
    """What the video processor of a model's folder has."""
    import transformers as hf

    cls = hf.Qwen3VLVideoProcessor if case["family"] == "qwen3_vl" else hf.Qwen2VLVideoProcessor
    made = cls.from_pretrained(case["folder"])
    limits = {name: getattr(made, name) for name in ("fps", "min_frames", "max_frames", "cap_pixels_per_frame")}
    return {**limits, "size": {edge: made.size[edge] for edge in ("shortest_edge", "longest_edge")}}


def answer(case):
    if {"messages", "save_to"} & case.keys():
        return whole_reference.answer(case)
    if "folder" in case:
        return settings_of(case)
    whole = processor(case["family"], json.dumps(case["options"]))
    metadata = {"total_num_frames": case["num_frames"], "fps": case["fps"]}
    by = of_pixels if case["pixels"] else of_sizes
    indices, grid, text = by(whole, metadata, case["width"], case["height"])
    runs = re.split(f"((?:{re.escape(whole.video_token)})+)", text)
    layout = [r.count(whole.video_token) or r for r in runs if r]
    return {"indices": [int(i) for i in indices], "grid": grid, "layout": layout}


def of_pixels(whole, metadata, width, height):
    frames = np.zeros((metadata["total_num_frames"], height, width, 3), np.uint8)
    kwargs = {
        "video_metadata": [metadata], "return_tensors": "pt", "return_metadata": True,
        "input_data_format": "channels_last",
    }  # fmt: skip
    if "Omni" in type(whole).__name__:
        kwargs = {"videos_kwargs": kwargs, "load_audio_from_video": False}
    data, replacements = whole._process_videos(frames, **kwargs)
    (text,), _ = whole.get_text_with_replacements([whole.video_token], videos_replacements=replacements)
    grid = data["video_grid_thw"][0].tolist()
    assert len(data["pixel_values_videos"]) == np.prod(grid)
    return data["video_metadata"][0].frames_indices, grid, text


def of_sizes(whole, metadata, width, height):
    from transformers.video_utils import VideoMetadata

    video = whole.video_processor
    facts = VideoMetadata(**metadata)
    indices = video.sample_frames(facts, fps=video.fps).tolist()
    # The processor's arithmetic sometimes yields an index just past the end: no frame, for any decoder.
    inside = [i for i in indices if i < metadata["total_num_frames"]]
    facts.frames_indices = list(inside)
    # One value seen as a whole video: the processor's rule runs, and Pillow's part is only asked for the size.
    frames = torch.zeros(1).expand(1, len(inside), 3, height, width)
    resized = video.resize(
        frames, video.size, None, factor=video.patch_size * video.merge_size,
        temporal_factor=video.temporal_patch_size, cap_pixels_per_frame=video.cap_pixels_per_frame,
    )  # fmt: skip
    grid_t = -(-len(inside) // video.temporal_patch_size)
    grid = [grid_t, *(side // video.patch_size for side in resized.shape[-2:])]
    facts_of_video = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [facts]}
    return indices, grid, whole.replace_video_token(facts_of_video, 0, load_audio_from_video=False)


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    kept = import_torchvision()
    from transformers.image_processing_backends import TorchvisionBackend

    resize = TorchvisionBackend.resize

    def resize_shape(self, image, size, **kwargs):
        if image.numel() and image.stride(-1) == 0:
            return torch.zeros(1).expand(*image.shape[:-2], size.height, size.width)
        return resize(self, image, size, **kwargs)

    TorchvisionBackend.resize = resize_shape
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)
    del kept


if __name__ == "__main__":
    main()
