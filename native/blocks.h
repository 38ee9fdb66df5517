// A tile of rows under a panel's vectors, in blocks whose sums the registers hold.
#pragma once
#include <type_traits>

namespace {

template <int VALUE> using Constant = std::integral_constant<int, VALUE>;

// Calls `block(first, rows, vector, vectors)`, with constants, for blocks that together are ROWS rows under `Shape::ALL`
// vectors: of so many rows at once as are nearly alike, at most `Shape::MOST`, and of so many vectors as
// `Shape::vectors(rows)` leaves registers for.
template <typename Shape, int ROWS, int FIRST = 0, int VECTOR = 0, typename Block>
inline __attribute__((always_inline)) void in_blocks(const Block &block) {
    constexpr int MOST = Shape::MOST, LEFT = ROWS - FIRST;
    constexpr int COUNT = LEFT <= MOST ? LEFT : LEFT < 2 * MOST ? (LEFT + 1) / 2 : MOST;
    constexpr int VECTORS = Shape::vectors(COUNT);
    block(Constant<FIRST>{}, Constant<COUNT>{}, Constant<VECTOR>{}, Constant<VECTORS>{});
    if constexpr (VECTOR + VECTORS < Shape::ALL)
        in_blocks<Shape, ROWS, FIRST, VECTOR + VECTORS>(block);
    else if constexpr (FIRST + COUNT < ROWS)
        in_blocks<Shape, ROWS, FIRST + COUNT>(block);
}

} // namespace
