"""Compile oip.proto to the descriptor that the gRPC server loads. Needs grpcio-tools.

usage: python scripts/compile_proto.py [OUT]
"""

import sys
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).parents[1] / "chairlift" / "server" / "oip"


def compile_proto(out: Path) -> None:
    arguments = ["protoc", f"--proto_path={FOLDER}", f"--descriptor_set_out={out}", str(FOLDER / "oip.proto")]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    compile_proto(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "oip.binpb")
