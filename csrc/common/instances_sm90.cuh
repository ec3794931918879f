// Which variants of the kernel for sm_90a are compiled: the fastest that bench/kernels/tune.cu found for some M and
// shape.
#pragma once
#include "common/launch_sm90.cuh"

namespace sparse_marlin {

template <class W> void add_sm90(std::vector<Instance>& list) {
  // warpgroups, tokens, columns, steps of a commit group, blocks per multiprocessor
  if constexpr (W::BITS == 4) {
    list.push_back(instance_sm90<Sm90Config<W, 2, 8, 256, 4, 2>>("sm90_128x8"));
    list.push_back(instance_sm90<Sm90Config<W, 4, 8, 256, 4, 1>>("sm90_256x8"));
    list.push_back(instance_sm90<Sm90Config<W, 2, 16, 256, 4, 2>>("sm90_128x16"));
    list.push_back(instance_sm90<Sm90Config<W, 2, 32, 256, 4, 1>>("sm90_128x32"));
    list.push_back(instance_sm90<Sm90Config<W, 4, 32, 256, W::SPARSE ? 2 : 4, 1>>("sm90_256x32"));
    list.push_back(instance_sm90<Sm90Config<W, 2, 64, 256, 2, 1>>("sm90_128x64"));
    list.push_back(instance_sm90<Sm90Config<W, 4, 64, 256, 2, 1>>("sm90_256x64"));
    list.push_back(instance_sm90<Sm90Config<W, 2, 128, 128, 2, 1>>("sm90_128x128"));
    list.push_back(instance_sm90<Sm90Config<W, 2, 256, 128, 2, 1>>("sm90_128x256"));
  } else {  // the memory is the limit for longer: fewer tiles of tokens, and one length of group, lose little
    list.push_back(instance_sm90<Sm90Config<W, 2, 16, 128, 2, 2>>("sm90_128x16"));
    list.push_back(instance_sm90<Sm90Config<W, 2, 64, 128, 2, 1>>("sm90_128x64"));
    list.push_back(instance_sm90<Sm90Config<W, 2, 128, 128, 2, 1>>("sm90_128x128"));
  }
}

}  // namespace sparse_marlin
