"""`python -m raycap_onnx FOLDER IMAGE...`: captions image files with an exported captioner."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from raycap_onnx.captioner import Captioner
from raycap_onnx.description import CaptionerError


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per image. Returns 0, or 1 if an image cannot be used, or 2 for a mistake of the caller."""
    parser = argparse.ArgumentParser(prog="python -m raycap_onnx", description="Caption image files.")
    parser.add_argument("folder", metavar="FOLDER", help="what raycap export wrote")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of onnxruntime")
    parser.add_argument("--json", action="store_true", help="print JSON lines with log-probabilities")
    options = parser.parse_args(argv)
    try:
        captioner = Captioner(options.folder, threads=options.threads)
    except CaptionerError as error:
        print(f"raycap_onnx: {error}", file=sys.stderr)
        return 2
    exit_code = 0
    for name in options.images:
        row: dict[str, str | float] = {"image": name}
        try:
            (caption,) = captioner.caption([name])
            row |= {"caption": caption.text, "log_prob": round(caption.log_prob, 6)}
        except CaptionerError as error:
            exit_code, row["error"] = 1, str(error).removeprefix(f"{name}: ")
        text = json.dumps(row) if options.json else f"{name}: {row.get('error', row.get('caption'))}"
        print("".join(char if char.isprintable() else ascii(char)[1:-1] for char in text), flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
