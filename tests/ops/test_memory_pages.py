"""Memory for weights and caches: zero, aligned, and nobody's else."""

import torch

from chairlift.ops.native import zeros


def test_pieces_are_zero_aligned_and_apart():
    sizes = [1, 63, 64, 4096, 3 * 2**20, 9 * 2**20, 7]
    pieces = [zeros(size, torch.int8) for size in sizes]
    for number, piece in enumerate(pieces, 1):
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number)
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True), 1):
        assert piece.tolist() == [number] * size if size < 100 else bool((piece == number).all())


def test_elements_have_their_size():
    piece = zeros(1000, torch.bfloat16)
    assert piece.shape == (1000,)
    assert piece.dtype == torch.bfloat16


def test_memory_outlives_what_was_made_beside_it():
    kept = zeros(1000, torch.int8).fill_(3)
    for _ in range(50):
        zeros(2**20, torch.int8).fill_(4)
    assert bool((kept == 3).all())
