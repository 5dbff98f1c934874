// The Python face of the core: addresses, sizes and NumPy arrays in; nothing here decides anything.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bpe.h"
#include "decoder.h"
#include "json_tally.h"
#include "reader.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace spile;

namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

template <class T>
const T* at(uint64_t address) {
  return reinterpret_cast<const T*>(address);
}

const Kernels* kernels_or_throw(const std::string& name) {
  const Kernels* kernels = find_kernels(name.c_str());
  if (kernels) return kernels;
  std::string known;
  for (const char* const* n = available_kernels(); *n; ++n) known += (known.empty() ? "" : ", ") + std::string(*n);
  throw nb::value_error(("instruction set '" + name + "' is not one that this machine runs: " + known).c_str());
}

DecoderConfig config_from(const nb::dict& d) {
  const auto integer = [&](const char* key) { return nb::cast<int>(d[key]); };
  DecoderConfig c;
  c.hidden_size = integer("hidden_size");
  c.num_layers = integer("num_layers");
  c.num_heads = integer("num_heads");
  c.num_kv_heads = integer("num_kv_heads");
  c.head_dim = integer("head_dim");
  c.num_experts = integer("num_experts");
  c.num_chosen = integer("num_chosen");
  c.expert_size = integer("expert_size");
  c.dense_size = integer("dense_size");
  c.rope_dims = integer("rope_dims");
  c.vocab_size = integer("vocab_size");
  c.window = integer("window");
  c.rms_norm_eps = nb::cast<float>(d["rms_norm_eps"]);
  c.expert_limit = nb::cast<float>(d["expert_limit"]);
  c.dense_limit = nb::cast<float>(d["dense_limit"]);
  c.renormalise = nb::cast<bool>(d["renormalise"]);
  c.router_eps = nb::cast<float>(d["router_eps"]);
  c.full_bits = {integer("key_bits"), integer("value_bits")};
  c.ring_bits = {integer("ring_key_bits"), integer("ring_value_bits")};
  c.max_chunk = integer("max_chunk");
  c.activation_bytes = integer("activation_bytes");
  c.sliding = nb::cast<std::vector<bool>>(d["sliding"]);
  c.rotates = nb::cast<std::vector<bool>>(d["rotates"]);
  return c;
}

void set_layer(Decoder& decoder, int layer, const nb::dict& d) {
  const auto address = [&](const char* key) { return d.contains(key) ? nb::cast<uint64_t>(d[key]) : uint64_t{0}; };
  const auto halves = [&](const char* key) { return at<uint16_t>(address(key)); };
  const auto linear = [&](const std::string& key) {
    return Linear{at<uint8_t>(address(key.c_str())), halves((key + "_alpha").c_str())};
  };
  LayerWeights& w = decoder.layers.at(static_cast<size_t>(layer));
  w.input_norm = halves("input_norm");
  w.post_norm = halves("post_norm");
  w.q_norm = halves("q_norm");
  w.k_norm = halves("k_norm");
  w.router = halves("router");
  w.q = linear("q");
  w.k = linear("k");
  w.v = linear("v");
  w.o = linear("o");
  w.gate = linear("gate");
  w.up = linear("up");
  w.down = linear("down");
  w.gate_alpha = halves("gate_alpha");
  w.up_alpha = halves("up_alpha");
  w.down_alpha = halves("down_alpha");
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const char* const* n = available_kernels(); *n; ++n) names.emplace_back(*n);
  return names;
}

std::vector<ReadRequest> requests_from(const Array<const uint64_t, 2>& rows) {  // [n, 5]: fd, offset, wanted, room, address
  std::vector<ReadRequest> list(rows.shape(0));
  for (size_t i = 0; i < list.size(); ++i) {
    const uint64_t* r = rows.data() + 5 * i;
    list[i] = {static_cast<int>(static_cast<int64_t>(r[0])), r[1], r[2], r[3], reinterpret_cast<uint8_t*>(r[4])};
  }
  return list;
}

template <class T, int N>
nb::ndarray<nb::numpy, T> own(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, nb::capsule(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); }));
}

// One linear layer by itself, for tests: y [T, out]. `multiply` gets the T fixed vectors and where their results go.
template <class Multiply>
nb::ndarray<nb::numpy, float> linear(const Kernels* kernels, const Array<const float, 2>& x, size_t out, int activation_bytes,
                                     Layout layout, const Multiply& multiply) {
  const size_t T = x.shape(0), n = x.shape(1);
  Buffer<int8_t> planes(T * 3 * plane_nbytes(n));
  std::vector<int32_t> groups(layout == Layout::kNibble ? T * num_group_sums(n) : 0);
  std::vector<Fixed> fixed(T);
  std::vector<const Fixed*> xs(T);
  std::vector<float> y(T * out);
  std::vector<float*> ys(T);
  for (size_t t = 0; t < T; ++t) {
    fixed[t] = kernels->fix(x.data() + t * n, n, activation_bytes, layout, planes.data() + t * 3 * plane_nbytes(n),
                            groups.empty() ? nullptr : groups.data() + t * num_group_sums(n));
    xs[t] = &fixed[t];
    ys[t] = y.data() + t * out;
  }
  multiply(xs.data(), static_cast<int>(T), ys.data());
  return own<float, 2>(std::move(y), {T, out});
}

nb::ndarray<nb::numpy, float> ternary_linear(Array<const float, 2> x, Array<const uint32_t, 2> codes,
                                             Array<const uint16_t, 1> alpha, int activation_bytes, const std::string& isa) {
  const Kernels* kernels = kernels_or_throw(isa);
  const size_t n = x.shape(1), out = codes.shape(0);
  if (codes.shape(1) * 16 != n || alpha.shape(0) != out) throw nb::value_error("shapes of x, codes and alpha disagree");
  const Ternary w = {reinterpret_cast<const uint8_t*>(codes.data()), alpha.data(), n};
  return linear(kernels, x, out, activation_bytes, Layout::kTernary,
                [&](const Fixed* const* xs, int T, float* const* ys) { kernels->ternary(w, 0, out, xs, T, ys); });
}

nb::ndarray<nb::numpy, float> affine4_linear(Array<const float, 2> x, Array<const uint32_t, 2> codes,
                                             Array<const uint16_t, 2> scales, Array<const uint16_t, 2> biases,
                                             int activation_bytes, const std::string& isa) {
  const Kernels* kernels = kernels_or_throw(isa);
  const size_t n = x.shape(1), out = codes.shape(0);
  if (codes.shape(1) * 8 != n || scales.shape(1) * 64 != n) throw nb::value_error("shapes of x, codes and scales disagree");
  const Affine4 w = {reinterpret_cast<const uint8_t*>(codes.data()), scales.data(), biases.data(), n};
  return linear(kernels, x, out, activation_bytes, Layout::kNibble,
                [&](const Fixed* const* xs, int T, float* const* ys) { kernels->affine4(w, 0, out, xs, T, ys); });
}

// The ids of words, one after the other.
nb::list encode_words(const Bpe& bpe, const nb::list& words) {
  std::vector<uint32_t> ids;
  for (const nb::handle word : words) {
    Py_ssize_t n = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(word.ptr(), &n);
    if (!bytes) throw nb::python_error();
    bpe.encode(reinterpret_cast<const uint8_t*>(bytes), static_cast<size_t>(n), &ids);
  }
  nb::list out;
  for (const uint32_t id : ids) out.append(id);
  return out;
}

nb::ndarray<nb::numpy, uint32_t> bpe_merge_slots(Array<const uint32_t, 2> merges) {  // [n, 3] -> [slots, 4]
  if (merges.shape(1) != 3) throw nb::value_error("merges must be rows of left, right, merged");
  const auto slots = hash_merges(merges.data(), merges.shape(0));
  std::vector<uint32_t> flat;
  flat.reserve(4 * slots.size());
  for (const MergeSlot& s : slots) flat.insert(flat.end(), {s.left, s.right, s.rank, s.merged});
  return own<uint32_t, 2>(std::move(flat), {slots.size(), 4});
}

nb::ndarray<nb::numpy, uint32_t> bpe_word_slots(Array<const uint32_t, 1> ids, Array<const uint32_t, 1> offsets,
                                                Array<const uint8_t, 1> blob) {
  for (size_t k = 0; k < ids.shape(0); ++k) {
    const size_t id = ids.data()[k];
    if (id + 1 >= offsets.shape(0) || offsets.data()[id] > offsets.data()[id + 1] || offsets.data()[id + 1] > blob.shape(0))
      throw nb::value_error("an entry lies outside of the bytes");
  }
  auto slots = hash_words(ids.data(), ids.shape(0), offsets.data(), blob.data());
  const size_t n = slots.size();
  return own<uint32_t, 1>(std::move(slots), {n});
}

nb::ndarray<nb::numpy, uint8_t> read_cache(const KvCache& cache, int layer, int64_t start, int64_t end) {
  cache.check_span(layer, start, end, true);
  const size_t nbytes = cache.shape().position_nbytes(layer);
  std::vector<uint8_t> data(static_cast<size_t>(end - start) * nbytes);
  {
    nb::gil_scoped_release release;
    cache.read(layer, start, end, data.data());
  }
  return own<uint8_t, 2>(std::move(data), {static_cast<size_t>(end - start), nbytes});
}

void write_cache(KvCache& cache, int layer, int64_t start, Array<const uint8_t, 2> data) {
  cache.check_span(layer, 0, 0, false);
  if (data.shape(1) != cache.shape().position_nbytes(layer)) throw nb::value_error("rows of another length than a position's");
  nb::gil_scoped_release release;
  cache.write(layer, start, start + static_cast<int64_t>(data.shape(0)), data.data());
}

}  // namespace

NB_MODULE(_core, m) {
  m.def("isas", &isas);
  m.def("ternary_linear", &ternary_linear, "x"_a, "codes"_a, "row_alpha"_a, "activation_bytes"_a = 2, "isa"_a = "");
  m.def("affine4_linear", &affine4_linear, "x"_a, "codes"_a, "scales"_a, "biases"_a, "activation_bytes"_a = 2, "isa"_a = "");

  nb::class_<Reader>(m, "Reader")
      .def(nb::init<int>(), "num_threads"_a)
      .def("submit",
           [](Reader& self, Array<const uint64_t, 2> requests) { return self.submit(requests_from(requests)); })
      .def("is_done", &Reader::is_done)
      .def("wait",
           [](Reader& self, uint64_t ticket) {
             ReadFailure f;
             {
               nb::gil_scoped_release release;
               f = self.wait(ticket);
             }
             return std::make_tuple(f.index, f.offset, f.wanted, f.got, f.error);
           })
      .def("cancel", &Reader::cancel)
      .def("drain", &Reader::drain, NoGil())
      .def("counters",
           [](Reader& self) {
             const ReadCounters c = self.counters();
             return std::make_tuple(c.bytes, c.reads, c.seconds);
           })
      .def("set_faults", [](Reader& self, uint64_t max_bytes, uint64_t interrupt_every, uint64_t fail_at, int fail_with, uint64_t page) {
        self.set_faults({max_bytes, interrupt_every, fail_at, fail_with, page});
      }, "max_bytes"_a = 0, "interrupt_every"_a = 0, "fail_at"_a = 0, "fail_with"_a = 0, "page"_a = 0);

  m.def("tally_json", [](Array<const uint8_t, 1> text) {
    JsonTally t;
    {
      nb::gil_scoped_release release;
      t = tally_json(text.data(), text.shape(0));
    }
    return std::make_tuple(t.lists, t.objects, t.keys, t.strings, t.scalars, t.text_nbytes);
  }, "text"_a);

  m.def("bpe_merge_slots", &bpe_merge_slots, "merges"_a);
  m.def("bpe_word_slots", &bpe_word_slots, "ids"_a, "offsets"_a, "blob"_a);
  nb::class_<Bpe>(m, "Bpe")
      .def("__init__",
           [](Bpe* self, Array<const uint8_t, 1> table) {
             try {
               new (self) Bpe(table.data(), table.shape(0));
             } catch (const std::invalid_argument& damage) {
               throw nb::value_error(damage.what());
             }
           },
           "table"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("num_entries", &Bpe::num_entries)
      .def("encode", &encode_words, "words"_a);

  nb::class_<KvCache>(m, "KvCache")
      .def_rw("position", &KvCache::position)
      .def_prop_ro("nbytes", &KvCache::nbytes)
      .def("nbytes_per_position", [](const KvCache& self, int layer) {
             self.check_span(layer, 0, 0, false);
             return self.shape().position_nbytes(layer);
           }, "layer"_a)
      .def("read", &read_cache, "layer"_a, "start"_a, "end"_a)
      .def("write", &write_cache, "layer"_a, "start"_a, "data"_a);

  nb::class_<Decoder>(m, "Decoder")
      .def("__init__",
           [](Decoder* self, const nb::dict& config, const std::string& isa, int num_threads) {
             new (self) Decoder(config_from(config), kernels_or_throw(isa), num_threads);
           })
      .def("set_layer", &set_layer)
      .def("set_final_norm", [](Decoder& self, uint64_t address) { self.final_norm = at<uint16_t>(address); })
      .def("new_cache", [](const Decoder& self) { return new KvCache(self.cache_shape()); }, nb::rv_policy::take_ownership)
      .def("begin",
           [](Decoder& self, uint64_t codes, uint64_t scales, uint64_t biases, Array<const int64_t, 1> rows,
              Array<const float, 2> rope) {
             if (rope.shape(0) != rows.shape(0) || static_cast<int>(rope.shape(1)) != self.config().rope_dims)
               throw nb::value_error("rope must be [tokens, rope_dims]");
             const Affine4 table = {at<uint8_t>(codes), at<uint16_t>(scales), at<uint16_t>(biases),
                                    static_cast<size_t>(self.config().hidden_size)};
             self.begin(table, rows.data(), static_cast<int>(rows.shape(0)), rope.data());
           },
           NoGil())
      .def("attend", &Decoder::attend, NoGil())
      .def("dense", &Decoder::dense, NoGil())
      .def("route",
           // ids and counts [E] are filled from the front; allowed is [E], or None where every expert may be chosen
           [](Decoder& self, int layer, Array<int32_t, 1> ids, Array<int32_t, 1> counts,
              std::optional<Array<const uint8_t, 1>> allowed) {
             const auto& found = self.route(layer, allowed ? allowed->data() : nullptr);
             std::copy(found.begin(), found.end(), ids.data());
             std::copy(self.counts().begin(), self.counts().end(), counts.data());
             return static_cast<int>(found.size());
           },
           NoGil(), "layer"_a, "ids"_a, "counts"_a, "allowed"_a = nb::none())
      .def("foretell", [](Decoder& self, int layer, Array<int32_t, 1> ids) { self.foretell(layer, ids.data()); }, NoGil(),
           "layer"_a, "ids"_a)  // ids [num_chosen] are filled
      .def("experts",
           [](Decoder& self, int layer, Array<const int32_t, 1> ids, Array<const uint64_t, 2> codes) {
             self.experts(layer, ids.data(), codes.data(), static_cast<int>(ids.shape(0)));
           },
           NoGil())
      .def("read_cached",  // on the decoder's threads, which would only wait for the bytes
           [](Decoder& self, Array<const uint64_t, 2> requests, Array<uint8_t, 1> done) {
             const auto list = requests_from(requests);
             self.threads().run(static_cast<int>(list.size()), [&](int i, int) {
               done.data()[i] = read_cached(list[static_cast<size_t>(i)]);
             });
           },
           NoGil())
      .def("combine", &Decoder::combine, NoGil())
      .def("finish", &Decoder::finish, "num"_a, "after"_a = 0, NoGil())
      .def("take_fault",  // None, or (stage, layer, item)
           [](Decoder& self) -> std::optional<std::tuple<int, int, int>> {
             const Fault fault = self.take_fault();
             if (fault.stage == Stage::kNone) return std::nullopt;
             return std::make_tuple(static_cast<int>(fault.stage), fault.layer, fault.item);
           })
      .def("head",
           [](Decoder& self, uint64_t codes, uint64_t scales, uint64_t biases, int row, int count, Array<float, 2> out) {
             const Affine4 piece = {at<uint8_t>(codes), at<uint16_t>(scales), at<uint16_t>(biases),
                                    static_cast<size_t>(self.config().hidden_size)};
             self.head(piece, row, count, out.data());
           },
           NoGil());
}
