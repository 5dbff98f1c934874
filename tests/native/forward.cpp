// Turns a dump of a small model and some token ids into one hash of all logits' bytes, with no Python: so that the core can be
// run for another processor under an emulator, and its bits compared.
//
//   forward --isas                          the instruction sets that this machine runs, one a line
//   forward DUMP ISA THREADS CHUNK          FNV-1a 64 of the logits [T, V]
//
// The dump (tests/native/dump.py): the integers and numbers of `Header`, whether each layer is sliding
// and whether RoPE turns its heads, then blobs, each behind
// its length in bytes (uint64) and with no alignment, in the order in which `main` takes them. Little-endian.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "decoder.h"

namespace {

struct Header {
  char magic[8];
  int32_t hidden_size, num_layers, num_heads, num_kv_heads, head_dim, num_experts, num_chosen, expert_size, dense_size,
      rope_dims, vocab_size, window, key_bits, value_bits, ring_key_bits, ring_value_bits, activation_bytes, num_dense_layers;
  float rms_norm_eps, expert_limit, dense_limit, router_eps;
};

class Dump {
 public:
  explicit Dump(const char* path) {
    std::ifstream file(path, std::ios::binary);
    data_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  void take(void* to, size_t nbytes) {
    if (data_.size() - at_ < nbytes) {
      std::fprintf(stderr, "the dump ends too early\n");
      std::exit(1);
    }
    std::memcpy(to, data_.data() + at_, nbytes);
    at_ += nbytes;
  }
  const uint8_t* blob(uint64_t* nbytes = nullptr) {
    uint64_t length = 0;
    take(&length, sizeof length);
    const char* start = data_.data() + at_;
    if (data_.size() - at_ < length) {
      std::fprintf(stderr, "the dump ends too early\n");
      std::exit(1);
    }
    at_ += length;
    if (nbytes) *nbytes = length;
    return reinterpret_cast<const uint8_t*>(start);
  }
  const uint16_t* halves() { return reinterpret_cast<const uint16_t*>(blob()); }

 private:
  std::vector<char> data_;
  size_t at_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  using namespace spile;
  if (argc == 2 && !std::strcmp(argv[1], "--isas")) {
    for (const char* const* name = available_kernels(); *name; ++name) std::puts(*name);
    return 0;
  }
  if (argc != 5) {
    std::fprintf(stderr, "usage: forward --isas | forward DUMP ISA THREADS CHUNK\n");
    return 2;
  }
  const Kernels* kernels = find_kernels(argv[2]);
  if (!kernels) {
    std::fprintf(stderr, "this machine does not run %s\n", argv[2]);
    return 1;
  }
  const int chunk = std::atoi(argv[4]);
  Dump dump(argv[1]);
  Header h;
  dump.take(&h, sizeof h);
  if (std::memcmp(h.magic, "SPILEFW3", 8) != 0) {
    std::fprintf(stderr, "%s is no dump\n", argv[1]);
    return 1;
  }
  DecoderConfig c;
  c.hidden_size = h.hidden_size;
  c.num_layers = h.num_layers;
  c.num_heads = h.num_heads;
  c.num_kv_heads = h.num_kv_heads;
  c.head_dim = h.head_dim;
  c.num_experts = h.num_experts;
  c.num_chosen = h.num_chosen;
  c.expert_size = h.expert_size;
  c.dense_size = h.dense_size;
  c.rope_dims = h.rope_dims;
  c.vocab_size = h.vocab_size;
  c.window = h.window;
  c.rms_norm_eps = h.rms_norm_eps;
  c.expert_limit = h.expert_limit;
  c.dense_limit = h.dense_limit;
  c.renormalise = true;
  c.router_eps = h.router_eps;
  c.full_bits = {h.key_bits, h.value_bits};
  c.ring_bits = {h.ring_key_bits, h.ring_value_bits};
  c.max_chunk = chunk;
  c.activation_bytes = h.activation_bytes;
  for (auto* flags : {&c.sliding, &c.rotates})
    for (int layer = 0; layer < h.num_layers; ++layer) {
      uint8_t flag = 0;
      dump.take(&flag, 1);
      flags->push_back(flag != 0);
    }
  uint64_t rope_nbytes = 0;
  const uint8_t* rope_at = dump.blob(&rope_nbytes);
  std::vector<float> rope(rope_nbytes / sizeof(float));
  std::memcpy(rope.data(), rope_at, rope_nbytes);

  const auto affine = [&] {
    Affine4 table{};
    table.codes = dump.blob();
    table.scales = dump.halves();
    table.biases = dump.halves();
    table.n = static_cast<size_t>(h.hidden_size);
    return table;
  };
  const auto linear = [&] {
    Linear l;
    l.codes = dump.blob();
    l.alpha = dump.halves();
    return l;
  };
  Decoder decoder(c, kernels, std::atoi(argv[3]));
  const Affine4 embeddings = affine();
  std::vector<Linear> gates(decoder.layers.size()), ups(gates.size()), downs(gates.size());
  for (size_t layer = 0; layer < decoder.layers.size(); ++layer) {
    LayerWeights& w = decoder.layers[layer];
    w.input_norm = dump.halves();
    w.post_norm = dump.halves();
    w.q_norm = dump.halves();
    w.k_norm = dump.halves();
    w.q = linear();
    w.k = linear();
    w.v = linear();
    w.o = linear();
    if (static_cast<int>(layer) < h.num_dense_layers) {
      w.gate = linear();
      w.up = linear();
      w.down = linear();
    } else {
      w.router = dump.halves();
      gates[layer] = linear();
      ups[layer] = linear();
      downs[layer] = linear();
      w.gate_alpha = gates[layer].alpha;
      w.up_alpha = ups[layer].alpha;
      w.down_alpha = downs[layer].alpha;
    }
  }
  decoder.final_norm = dump.halves();
  const Affine4 head = affine();
  uint64_t ids_nbytes = 0;
  const uint8_t* ids_at = dump.blob(&ids_nbytes);
  std::vector<int64_t> ids(ids_nbytes / 8);
  std::memcpy(ids.data(), ids_at, ids_nbytes);

  const int total = static_cast<int>(ids.size());
  std::vector<float> logits(static_cast<size_t>(total) * static_cast<size_t>(h.vocab_size));
  KvCache cache(decoder.cache_shape());
  const size_t part = static_cast<size_t>(h.expert_size) * static_cast<size_t>(h.hidden_size) / 4;
  for (int start = 0; start < total; start += chunk) {
    const int T = total - start < chunk ? total - start : chunk;
    decoder.begin(embeddings, ids.data() + start, T, rope.data() + static_cast<size_t>(start) * static_cast<size_t>(h.rope_dims));
    for (int layer = 0; layer < h.num_layers; ++layer) {
      const size_t l = static_cast<size_t>(layer);
      decoder.attend(cache, layer);
      if (layer < h.num_dense_layers) {
        decoder.dense(layer);
        continue;
      }
      const std::vector<int32_t> chosen = decoder.route(layer);
      std::vector<uint64_t> codes;
      for (int32_t expert : chosen)
        for (const Linear* stack : {&gates[l], &ups[l], &downs[l]})
          codes.push_back(reinterpret_cast<uint64_t>(stack->codes + static_cast<size_t>(expert) * part));
      const size_t half = chosen.size() / 2;  // in two batches
      decoder.experts(layer, chosen.data(), codes.data(), static_cast<int>(half));
      decoder.experts(layer, chosen.data() + half, codes.data() + 3 * half, static_cast<int>(chosen.size() - half));
      decoder.combine();
    }
    decoder.finish(T);
    float* out = logits.data() + static_cast<size_t>(start) * static_cast<size_t>(h.vocab_size);
    decoder.head(head, 0, h.vocab_size, out);
    cache.position += T;
    const Fault fault = decoder.take_fault();
    if (fault.stage != Stage::kNone) {  // which NaN it became is the processor's
      std::printf("fault-%d-%d\n", static_cast<int>(fault.stage), fault.layer);
      return 0;
    }
  }
  uint64_t hash = 14695981039346656037u;
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(logits.data());
  for (size_t i = 0; i < logits.size() * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  std::printf("%016" PRIx64 "\n", hash);
  return 0;
}
