// `radix_sort.cu` on the CPU. `launch` takes arguments as CUDA's driver does.

#include "fibers.h"

#include "radix_sort.cu"

template <class T>
T argument(void** places, int place) {
  return *static_cast<T*>(places[place]);
}

#define RADIX_SORT_OF(ITEMS)                                                                                         \
  radix_sort_##ITEMS(argument<u32*>(at, 0), argument<u32*>(at, 1), argument<const u32*>(at, 2),                      \
                     argument<u32*>(at, 3), argument<u32*>(at, 4), argument<u32*>(at, 5), argument<u32*>(at, 6),     \
                     argument<u32*>(at, 7), argument<u32>(at, 8), argument<u32>(at, 9))

// The kernel of a number, in the order that `RadixSort` asks for.
extern "C" void launch(unsigned kernel, unsigned blocks, unsigned threads, void** at) {
  run_blocks(blocks, threads, [=] {
    if (kernel == 0) RADIX_SORT_OF(4);
    if (kernel == 1) RADIX_SORT_OF(8);
    if (kernel == 2) {
      count_digits(argument<const u32*>(at, 0), argument<u32*>(at, 1), argument<u32>(at, 2), argument<u32>(at, 3));
    }
    if (kernel == 3) sum_digits(argument<u32*>(at, 0), argument<u32*>(at, 1), argument<u32>(at, 2));
    if (kernel == 4) {
      sort_by_digit(argument<const u32*>(at, 0), argument<const u32*>(at, 1), argument<u32*>(at, 2),
                    argument<u32*>(at, 3), argument<const u32*>(at, 4), argument<const u32*>(at, 5),
                    argument<u32>(at, 6), argument<u32>(at, 7));
    }
  });
}
