"""Hugging Face's processors on whole conversations: part of the process of `video_reference.py`.

A case has `family`, `tokenizer` (a file), `named` (its extra tokens), `template`, `messages`, `options` of the parts of
the processor, and what black media are like: `images`, `videos` and `audio`. The answer has `ids`. With `save_to` it is
written as a model's folder has it instead; with `generate_by`, a folder, what transformers' automatic classes make of
that is the answer: the name of the processor, the ids of the prompt and those that the model says next.
"""

from __future__ import annotations

from functools import cache

import numpy as np


@cache
def words(path, named):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=path, extra_special_tokens=dict(named))


def processor(case):
    import transformers as hf

    family, options = case["family"], case["options"]
    made = words(case["tokenizer"], tuple(sorted(case["named"].items())))
    if family == "qwen2_audio":
        return hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(**{"feature_size": 128, **options}), made)
    if family == "internvl":
        images, videos = hf.GotOcr2ImageProcessor(**options["image"]), hf.InternVLVideoProcessor(**options["video"])
        return hf.InternVLProcessor(images, made, videos, **options["whole"])
    if family == "llava_onevision":
        images = hf.LlavaOnevisionImageProcessor(**options["image"])
        videos = hf.LlavaOnevisionVideoProcessor(**options["video"])
        return hf.LlavaOnevisionProcessor(images, made, videos, **options["whole"])
    images = hf.Qwen2VLImageProcessor(**options["image"])
    videos = (hf.Qwen3VLVideoProcessor if family == "qwen3_vl" else hf.Qwen2VLVideoProcessor)(**options["video"])
    if family == "qwen2_5_omni_thinker":
        sound = hf.WhisperFeatureExtractor(**{"feature_size": 128, **options.get("audio", {})})
        return hf.Qwen2_5OmniProcessor(images, videos, sound, made)
    whole = {"qwen3_vl": hf.Qwen3VLProcessor, "qwen2_vl": hf.Qwen2VLProcessor}.get(family, hf.Qwen2_5_VLProcessor)
    return whole(images, made, videos)


def generated(case):
    import transformers as hf
    from PIL import Image

    folder = case["generate_by"]
    whole = hf.AutoProcessor.from_pretrained(folder)
    model = getattr(hf, case["auto"]).from_pretrained(folder, dtype="auto").eval()
    text = whole.apply_chat_template(case["messages"], add_generation_prompt=True, tokenize=False)
    media = {"images": [Image.open(path) for path in case["images"]], "audio": [np.load(p) for p in case["audio"]]}
    media = {kind: items for kind, items in media.items() if items}
    if "audio" in media:
        media["audio_kwargs"] = {"sampling_rate": 16000}
    inputs = whole(text=[text], return_tensors="pt", **media)
    given = inputs["input_ids"][0].tolist()
    said = model.generate(**inputs, max_new_tokens=case["num_tokens"], do_sample=False)[0].tolist()
    return {"class": type(whole).__name__, "prompt": given, "said": said[len(given) :]}


def answer(case):
    from PIL import Image

    if "save_to" in case:
        return {"files": processor(case).save_pretrained(case["save_to"])}
    if "generate_by" in case:
        return generated(case)
    whole = processor(case)
    text = whole.apply_chat_template(case["messages"], chat_template=case["template"], tokenize=False)
    media = {
        "images": [[Image.new("RGB", tuple(size)) for size in case["images"]]] if case["images"] else [],
        "videos": [np.zeros((n, height, width, 3), np.uint8) for n, _, width, height in case["videos"]],
        "audio": [np.zeros(n, np.float32) for n in case["audio"]],
    }
    media = {kind: items for kind, items in media.items() if items}
    if "videos" in media:
        facts = [{"total_num_frames": n, "fps": fps, "duration": n / fps} for n, fps, *_ in case["videos"]]
        media["videos_kwargs"] = {"video_metadata": facts, **case["options"].get("call", {})}
    if "audio" in media:
        media["audio_kwargs"] = {"sampling_rate": 16000}
    # LLaVA-OneVision stacks no videos of different lengths, InternVL joins tensors alone.
    kind = None if case["family"] == "llava_onevision" else "pt"
    return {"ids": [int(number) for number in whole(text=[text], return_tensors=kind, **media)["input_ids"][0]]}
