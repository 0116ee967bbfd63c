"""How each golden file was recorded, and a way to record it again.

    python tests/parity/golden/record.py                   prints the source of every file
    python tests/parity/golden/record.py --upstream DIR    computes the values again and compares them

DIR is a checkout of one of the repositories in SOURCES, at its commit, or the site-packages folder with the packages
that SOURCES names. The exit code is 1 if a value differs from the stored one by more than its tolerance; the last line
names the worst difference.

Everything runs on the CPU in float32, without dropout and in one thread. Weights and inputs are random, and their seeds
were not kept. So they cannot be recorded again, but all values that upstream computes from them can.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

GOLDEN = Path(__file__).resolve().parent
SHARED = Path(os.environ.get("RAYCAP_SHARED", GOLDEN.parents[3] / "shared"))
SOURCES = {
    "ExpansionNet v2": "github.com/jchenghu/ExpansionNet_v2 at a820a02d3fac077c797ddc56b3b256590cc64c19",
    "Meshed-Memory": "github.com/aimagelab/meshed-memory-transformer at 5d0600917850756d8edba64dee38458a84b64907",
    "BERTScore": "the packages bert-score 0.3.12 and transformers 4.57.6 of PyPI",
}
# a file of each source that the others lack
MARKS = {
    "ExpansionNet v2": "models/ExpansionNet_v2.py",
    "Meshed-Memory": "models/transformer/decoders.py",
    "BERTScore": "bert_score/scorer.py",
}

Values = dict[str, Any]


class Recording(NamedTuple):
    """The source of one file. `compute` returns the values that can be computed again, by their key in the file.

    tolerance: the largest absolute difference between a stored and a computed value.
    """

    source: str
    how: str
    compute: Callable[[Path], Values] | None = None
    tolerance: float = 1e-5


def expansionnet_arguments(config: dict[str, Any]) -> dict[str, Any]:
    words = [str(index) for index in range(config["vocab"])]
    return {
        "d_model": config["d_model"],
        "N_enc": config["n_enc"],
        "N_dec": config["n_dec"],
        "ff": config["d_ff"],
        "num_heads": config["heads"],
        "num_exp_enc_list": config["G"],
        "num_exp_dec": config["n_e"],
        "output_word2idx": {word: index for index, word in enumerate(words)},
        "output_idx2word": words,
        "max_seq_len": config["max_len"],
        "drop_args": SimpleNamespace(enc=0.0, dec=0.0, enc_input=0.0, dec_input=0.0, other=0.0),
        "rank": "cpu",
    }


def expansionnet(checkpoint: str) -> tuple[Any, Values]:
    """Upstream's captioning model with the weights of a checkpoint, and the content of expected.json."""
    from models.ExpansionNet_v2 import ExpansionNet_v2

    expected = json.loads((GOLDEN / "expansionnet_v2" / "expected.json").read_text())
    config = expected["config"]
    model = ExpansionNet_v2(**expansionnet_arguments(config), img_feature_dim=config["feat_dim"])
    model.load_state_dict(torch.load(GOLDEN / "expansionnet_v2" / checkpoint)["model_state_dict"])
    return model.eval(), expected


def arrays_of(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in np.load(GOLDEN / name).items()}


def smoothed_loss(logits: torch.Tensor, targets: torch.Tensor, pad: int) -> torch.Tensor:
    """Upstream's loss. Its division by the number of tokens needs a GPU, so this function divides."""
    from losses.loss import LabelSmoothingLoss

    total = LabelSmoothingLoss(0.1, rank="cpu")(logits, targets, pad, divide_by_non_zeros=False)
    return total / (targets != pad).sum()


def expansionnet_outputs(_: Path) -> Values:
    model, expected = expansionnet("checkpoint.pth")
    arrays = arrays_of("expansionnet_v2/expected.npz")
    features, tokens = arrays["features"], arrays["tokens"]
    feature_padding, token_padding = arrays["feature_padding"].tolist(), arrays["token_padding"].tolist()
    values: Values = {}
    for suffix, padding in (("", feature_padding), ("_unpadded", [0] * len(features))):
        memory = model.forward_enc(features, padding)
        values[f"encoder_output{suffix}"] = memory
        values[f"logits{suffix}"] = model.forward_dec(memory, padding, tokens[:, :-1], token_padding)
    values["label_smoothing_loss"] = smoothed_loss(values["logits"], tokens[:, 1:], expected["pad"])
    return {key: value.detach().numpy() for key, value in values.items()}


def beams(model: Any, inputs: torch.Tensor, expected: Values, beam_size: int, num_results: int) -> Values:
    """Upstream's beam search over inputs without padding; log-probabilities without the padding behind a caption."""
    with torch.no_grad():
        sequences, log_probs = model(
            inputs,
            enc_x_num_pads=[0] * len(inputs),
            mode="beam_search",
            beam_size=beam_size,
            how_many_outputs=num_results,
            beam_max_seq_len=expected["config"]["beam_len"],
            sos_idx=expected["sos"],
            eos_idx=expected["eos"],
        )
    trimmed = [
        [[round(value, 6) for value in values[: len(tokens)].tolist()] for tokens, values in zip(*image, strict=True)]
        for image in zip(sequences, log_probs, strict=True)
    ]
    return {"sequences": sequences, "log_probs": trimmed}


def expansionnet_searches(_: Path) -> Values:
    from models.ensemble_captioning_model import EsembleCaptioningModel

    model, expected = expansionnet("checkpoint.pth")
    second, _ = expansionnet("checkpoint_second.pth")
    arrays = arrays_of("expansionnet_v2/expected.npz")
    features, tokens, pad = arrays["features"], arrays["tokens"], expected["pad"]
    values: Values = {"beam_search": {str(size): beams(model, features, expected, size, size) for size in (2, 3, 5)}}
    values["ensemble_beam_3"] = beams(EsembleCaptioningModel([model, second], "cpu"), features, expected, 3, 3)
    padding = arrays["feature_padding"].tolist()
    logits = model(features, tokens[:, :-1], padding, arrays["token_padding"].tolist())
    smoothed_loss(logits, tokens[:, 1:], pad).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    values["gradient_norms"] = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    return values


def end_to_end() -> tuple[Any, Values, dict[str, torch.Tensor]]:
    """Upstream's model with the Swin in front, the content of expected.json, and the stored arrays."""
    from models.End_ExpansionNet_v2 import End_ExpansionNet_v2

    _, expected = expansionnet("checkpoint.pth")
    swin = expected["config"]["swin"]
    arguments = {
        "img_size": swin["img_size"],
        "patch_size": 4,
        "in_chans": 3,
        "embed_dim": swin["embed_dim"],
        "depths": swin["depths"],
        "num_heads": swin["num_heads"],
        "window_size": swin["window"],
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "qk_scale": None,
        "drop_rate": 0.0,
        "attn_drop_rate": 0.0,
        "drop_path_rate": 0.1,
        "norm_layer": torch.nn.LayerNorm,
        "ape": False,
        "patch_norm": True,
        "use_checkpoint": False,
    }
    model = End_ExpansionNet_v2(
        **{f"swin_{name}": value for name, value in arguments.items()},
        final_swin_dim=swin["embed_dim"] * 2 ** (len(swin["depths"]) - 1),
        **expansionnet_arguments(expected["config"]),
    )
    model.load_state_dict(torch.load(GOLDEN / "expansionnet_v2" / "end_to_end_checkpoint.pth")["model_state_dict"])
    return model.eval(), expected, arrays_of("expansionnet_v2/end_to_end_expected.npz")


@torch.no_grad()
def end_to_end_outputs(_: Path) -> Values:
    model, _, arrays = end_to_end()
    padding = [0] * len(arrays["images"])
    memory = model.forward_enc(arrays["images"], padding)
    logits = model.forward_dec(memory, padding, arrays["tokens"][:, :-1], arrays["token_padding"].tolist())
    values = {"swin_features": model.swin_transf(arrays["images"]), "encoder_output": memory, "logits": logits}
    return {key: value.numpy() for key, value in values.items()}


def end_to_end_searches(_: Path) -> Values:
    model, expected, arrays = end_to_end()
    return {"beam_5": beams(model, arrays["images"], expected, 5, 1)["sequences"]}


def swin_alone(_: Path) -> Values:
    model, _, _ = end_to_end()
    return {"model": model.swin_transf.state_dict()}


def rewards(_: Path) -> Values:
    """Upstream's reward with the captions of the shared COCO images as references."""
    from losses.reward import ReinforceCiderReward

    stored = json.loads((GOLDEN / "ciderd_reward.json").read_text())
    entries = json.loads((SHARED / "data" / "coco_subset" / "dataset.json").read_text())["images"]
    captions = {entry["cocoid"]: [sentence["raw"] for sentence in entry["sentences"]] for entry in entries}
    references = [captions[image] for image in stored["reference_image_ids"]]
    picked = [stored["reference_image_ids"].index(image) for image in stored["picked_image_ids"]]
    log_probs = torch.tensor([[sum(values) for values in image] for image in stored["log_probs"]]).unsqueeze(-1)
    scorer = ReinforceCiderReward(references, "EOS", 5, "cpu")
    loss, reward, baseline = scorer.compute_reward(stored["predictions"], log_probs, picked)
    return {"reward": reward.tolist(), "leave_one_out_baseline": baseline.tolist(), "loss": loss.item()}


def learning_rates(upstream: Path) -> Values:
    """Evaluates the schedule in upstream's train.py, a lambda inside a function that needs a GPU."""
    tree = ast.parse((upstream / "train.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    schedule = next(node for node in functions if "anneal_coeff" in ast.unparse(node))
    stored = json.loads((GOLDEN / "lr_schedules.json").read_text())
    values: Values = {}
    for name, stage in stored.items():
        settings = SimpleNamespace(
            lr=stage["base_lr"],
            warmup_iters=stage["warmup_iterations"],
            anneal_coeff=stage["anneal_coefficient"],
            anneal_every_epoch=stage["anneal_every_epochs"],
            min_lr=stage["min_lr"],
        )
        names = {"optim_args": settings, "num_batches": stage["iterations_per_epoch"]}
        rate = eval(compile(ast.Expression(schedule), "train.py", "eval"), names)
        values[name] = stage | {"lr": [rate(iteration) for iteration in stage["iterations"]]}
    return values


def as_in_old_torch() -> Any:
    """A context in which tensors behave as in torch 1.1, on which the upstream's beam search relies.

    There `/` of integers rounds down, and a mask may have bytes.
    """
    divide, masked_fill = torch.Tensor.__truediv__, torch.Tensor.masked_fill

    def divide_rounding_down(tensor: torch.Tensor, divisor: Any) -> torch.Tensor:
        if isinstance(divisor, int) and not tensor.is_floating_point():
            return tensor // divisor
        return divide(tensor, divisor)

    def fill_by_bytes(tensor: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
        return masked_fill(tensor, mask.bool(), value)

    return mock.patch.multiple(torch.Tensor, __truediv__=divide_rounding_down, masked_fill=fill_by_bytes)


@torch.no_grad()
def meshed_memory(_: Path) -> Values:
    from models.transformer.attention import ScaledDotProductAttentionMemory
    from models.transformer.decoders import MeshedDecoder
    from models.transformer.encoders import MemoryAugmentedEncoder
    from models.transformer.transformer import Transformer

    expected = json.loads((GOLDEN / "meshed_memory" / "expected.json").read_text())
    arrays, config = arrays_of("meshed_memory/expected.npz"), expected["config"]
    sizes = {"d_model": config["d_model"], "d_k": config["d_k"], "d_v": config["d_k"], "h": config["heads"]}
    sizes["d_ff"] = config["d_ff"]
    memory = {"attention_module": ScaledDotProductAttentionMemory, "attention_module_kwargs": {"m": config["m"]}}
    encoder = MemoryAugmentedEncoder(3, 0, d_in=config["feat_dim"], **sizes, **memory)
    decoder = MeshedDecoder(config["vocab"], config["max_len"], 3, expected["pad"], **sizes)
    model = Transformer(expected["bos"], encoder, decoder)
    model.load_state_dict(torch.load(GOLDEN / "meshed_memory" / "checkpoint.pth")["state_dict"])
    model.eval()
    with as_in_old_torch():
        sequences, log_probs = model.beam_search(arrays["features"], config["beam_len"], expected["eos"], 5, out_size=5)
    return {
        "encoder_output": model.encoder(arrays["features"])[0].numpy(),
        "log_probs": model(arrays["features"], arrays["tokens"]).numpy(),
        "beam_sequences": sequences.numpy(),
        "beam_log_probs": log_probs.numpy(),
    }


def bert_scorer(folder: Path, name: str, num_layers: int) -> Any:
    """The package's scorer with a stored model. folder: for the files that slow tokenizers of transformers read."""
    from bert_score.scorer import BERTScorer

    stored = GOLDEN / "bert_score" / name
    for path in stored.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    model = json.loads((stored / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "vocab.txt").write_text("\n".join(sorted(model["vocab"], key=model["vocab"].get)) + "\n")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model.get("merges", []))]) + "\n")
    scorer = BERTScorer(str(folder), num_layers, nthreads=0, device="cpu")
    scorer._tokenizer.model_max_length = bert_score_inputs()["max_tokens"]
    return scorer


def bert_score_inputs() -> Values:
    content: Values = json.loads((GOLDEN / "bert_score" / "expected.json").read_text())
    return content


def bert_scores(_: Path) -> Values:
    """The ids of all texts, and P, R and F of captions against one reference and against several.

    The package scores one pair at a time, because in larger batches it compares tokens with padding, too.
    """
    from bert_score.utils import sent_encode

    expected, ids, scores = bert_score_inputs(), Values(), Values()
    captions, references = expected["captions"], expected["references"]
    for name in ("bert", "roberta"):
        for layer in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                scorer = bert_scorer(Path(folder), name, layer)
            for kind, given in (("one", [texts[:1] for texts in references]), ("all", references)):
                values = scorer.score(captions, given, batch_size=1)
                scores[f"{name}, layer {layer}, {kind}"] = [column.tolist() for column in values]
        others = [text for texts in references for text in texts]
        ids[name] = [[sent_encode(scorer._tokenizer, text) for text in texts] for texts in (captions, others)]
    return {"ids": ids, "scores": scores}


INPUT = "random; an input of the other files"
FILES = {
    "bert_score/bert/config.json": Recording("BERTScore", "the sizes of the weights"),
    "bert_score/bert/model.safetensors": Recording("BERTScore", f"weights of BertForMaskedLM, {INPUT}"),
    "bert_score/bert/tokenizer.json": Recording("BERTScore", "WordPiece, trained on the captions of expected.json"),
    "bert_score/expected.json": Recording(
        "BERTScore", "ids and scores of bert_score.BERTScorer with slow tokenizers", bert_scores, tolerance=1e-6
    ),
    "bert_score/roberta/config.json": Recording("BERTScore", "the sizes of the weights"),
    "bert_score/roberta/model.safetensors": Recording("BERTScore", f"weights of RobertaModel, {INPUT}"),
    "bert_score/roberta/tokenizer.json": Recording(
        "BERTScore", "byte-level BPE, trained on the captions of expected.json"
    ),
    "ciderd_reward.json": Recording("ExpansionNet v2", "losses/reward.py for random predictions", rewards),
    "expansionnet_v2/checkpoint.pth": Recording("ExpansionNet v2", f"weights, {INPUT}"),
    "expansionnet_v2/checkpoint_second.pth": Recording("ExpansionNet v2", f"weights, {INPUT}"),
    "expansionnet_v2/end_to_end_checkpoint.pth": Recording("ExpansionNet v2", f"weights with a Swin, {INPUT}"),
    "expansionnet_v2/end_to_end_expected.json": Recording(
        "ExpansionNet v2", "beam search of models/End_ExpansionNet_v2.py", end_to_end_searches
    ),
    "expansionnet_v2/end_to_end_expected.npz": Recording(
        "ExpansionNet v2", "outputs of models/End_ExpansionNet_v2.py for random images", end_to_end_outputs
    ),
    "expansionnet_v2/expected.json": Recording(
        "ExpansionNet v2", "beam searches of one and two models, norms of the loss's gradients", expansionnet_searches
    ),
    "expansionnet_v2/expected.npz": Recording(
        "ExpansionNet v2",
        "outputs of models/ExpansionNet_v2.py for random features, losses/loss.py",
        expansionnet_outputs,
    ),
    "expansionnet_v2/swin_microsoft_format.pth": Recording(
        "ExpansionNet v2", "the Swin of end_to_end_checkpoint.pth under its original names", swin_alone
    ),
    "expansionnet_v2/tokens.pickle": Recording("ExpansionNet v2", "60 words in the layout of upstream's vocabulary"),
    "lr_schedules.json": Recording(
        "ExpansionNet v2", "the schedule custom_warmup_anneal of train.py", learning_rates, tolerance=1e-15
    ),
    "meshed_memory/checkpoint.pth": Recording("Meshed-Memory", f"weights, {INPUT}"),
    "meshed_memory/expected.json": Recording("Meshed-Memory", "the sizes of the weights"),
    "meshed_memory/expected.npz": Recording(
        "Meshed-Memory", "outputs and beam search of models/transformer for random features", meshed_memory
    ),
}


def read(path: Path) -> Values:
    match path.suffix:
        case ".json":
            content: Values = json.loads(path.read_text())
        case ".npz":
            content = dict(np.load(path))
        case _:
            content = torch.load(path)
    return content


def difference(stored: Any, computed: Any) -> float:
    """The largest difference of two numbers, arrays or nested collections; infinite where shapes or keys differ."""
    if isinstance(stored, dict):
        if stored.keys() != computed.keys():
            return math.inf
        return max((difference(stored[key], computed[key]) for key in stored), default=0.0)
    if isinstance(stored, list):
        if len(stored) != len(computed):
            return math.inf
        return max((difference(one, other) for one, other in zip(stored, computed, strict=True)), default=0.0)
    if np.shape(stored) != np.shape(computed):
        return math.inf
    differences = np.abs(np.asarray(stored, np.float64) - np.asarray(computed, np.float64))
    return float(np.nan_to_num(differences, nan=math.inf).max(initial=0.0))


def record(upstream: Path) -> int:
    """Computes the values of one upstream again and compares them with the stored ones. Returns the exit code."""
    source = next((name for name, mark in MARKS.items() if (upstream / mark).is_file()), None)
    if source is None:
        print(f"{upstream} is a checkout of neither {' nor '.join(SOURCES.values())}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(upstream))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # upstream uses forms that torch deprecates
    results: list[tuple[float, float, str]] = []  # a difference in multiples of its tolerance, itself, and its value
    for name, recording in FILES.items():
        if recording.source != source or recording.compute is None:
            continue
        try:
            stored, computed = read(GOLDEN / name), recording.compute(upstream)
        except FileNotFoundError as error:
            print(f"{name}: {error.filename} does not exist", file=sys.stderr)
            results.append((math.inf, math.inf, name))
            continue
        for key, value in computed.items():
            error_size = difference(stored[key], value)
            print(f"{error_size:8.1e}  {name}: {key}")
            results.append((error_size / recording.tolerance, error_size, f"{name}: {key}"))
    multiple, error_size, value_name = max(results)
    print(f"the worst difference is {error_size:.1e}, {multiple:.1g} times its tolerance, of {value_name}")
    return 0 if multiple <= 1 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, help="a checkout to compute the values with")
    arguments = parser.parse_args()
    if arguments.upstream is not None:
        return record(arguments.upstream.resolve())
    for name, recording in FILES.items():
        repeatable = "can be recorded again" if recording.compute else "cannot be recorded again"
        print(f"{name}: {recording.how}; {SOURCES[recording.source]}; {repeatable}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
