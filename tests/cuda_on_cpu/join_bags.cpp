// `join_bags.cu` on the CPU. `launch` takes arguments as CUDA's driver does.

#include "fibers.h"

#include "join_bags.cu"

extern "C" void launch(unsigned blocks, unsigned threads, void** at) {
  run_blocks(blocks, threads, [=] {
    join_bags(*static_cast<const Given*>(at[0]), *static_cast<Id**>(at[1]), *static_cast<i64**>(at[2]));
  });
}
