"""`python -m raycap_onnx FOLDER IMAGE...`: captions image files with an exported captioner."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from raycap_onnx.captioner import BATCH_SIZE, Captioner
from raycap_onnx.documents import CaptionerError
from raycap_onnx.images import load_image


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per image. The exit code is 1 if an image cannot be used, and 2 for a mistake of the caller."""
    parser = argparse.ArgumentParser(prog="python -m raycap_onnx", description="Caption image files.")
    parser.add_argument("folder", metavar="FOLDER", help="what raycap export wrote")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files")
    parser.add_argument("--beam", type=int, metavar="K", help="beams; 1 for greedy search")
    parser.add_argument("--max-length", type=int, metavar="T", help="tokens, with the begin and the end")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, metavar="B", help="images at a time")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of onnxruntime")
    parser.add_argument("--json", action="store_true", help="print JSON lines with log-probabilities")
    options = parser.parse_args(argv)
    exit_code = 0
    try:
        captioner = Captioner(options.folder, threads=options.threads)
        for row in _rows(captioner, options):
            exit_code |= "error" in row
            text = json.dumps(row) if options.json else f"{row['image']}: {row.get('caption', row.get('error'))}"
            print("".join(char if char.isprintable() else ascii(char)[1:-1] for char in text), flush=True)
    except CaptionerError as error:
        print(f"raycap_onnx: {error}", file=sys.stderr)
        return 2
    return exit_code


def _rows(captioner: Captioner, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The image, and its caption and log_prob or an error, of each image."""
    for start in range(0, len(options.images), max(1, options.batch_size)):
        images, errors = {}, {}
        names = options.images[start : start + max(1, options.batch_size)]
        for name in names:
            try:
                images[name] = load_image(name)
            except CaptionerError as error:
                errors[name] = str(error).removeprefix(f"{name}: ")
        search = {"beam_size": options.beam, "max_length": options.max_length, "batch_size": options.batch_size}
        captions = dict(zip(images, captioner.caption(images.values(), **search), strict=True))
        for name in names:
            if name in errors:
                yield {"image": name, "error": errors[name]}
            else:
                yield {"image": name, "caption": captions[name].text, "log_prob": round(captions[name].log_prob, 6)}


if __name__ == "__main__":
    sys.exit(main())
