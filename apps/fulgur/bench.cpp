#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "commands.h"
#include "flags.h"
#include "fulgur/error.h"
#include "fulgur/version.h"
#include "io/file.h"
#include "progress.h"
#include "ranks.h"
#include "workload/probes.h"
#include "workload/workload.h"

namespace fulgur::app {
namespace {

using nlohmann::ordered_json;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Mean seconds of some runs, one after the other.
double timed(const bench::Workload& workload, int runs) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < runs; ++i) workload.run();
  workload.wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / runs;
}

/// Seconds of a run, after one to warm up, of those that fit into a tenth of a second, or of one.
/// On the CPU their median. On a GPU, whose launches follow each other without waiting for the
/// host, their mean.
double burst_seconds(const bench::Workload& workload, Device device) {
  constexpr double kSeconds = 0.1;
  constexpr int kMaxRuns = 1000;
  timed(workload, 1);
  if (device.type == DeviceType::kCuda) {
    return timed(workload,
                 std::clamp(static_cast<int>(kSeconds / timed(workload, 1)), 1, kMaxRuns));
  }
  std::vector<double> seconds;
  double sum = 0;
  while (seconds.empty() || (sum < kSeconds && seconds.size() < kMaxRuns)) {
    seconds.push_back(timed(workload, 1));
    sum += seconds.back();
  }
  return median(seconds);
}

/// The CPU's name with the numbers of its kind, as virtual machines call many kinds by one name.
std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  std::map<std::string, std::string> values;
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    values[line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1)] = line.substr(colon + 2);
  }
  const std::string name = values["model name"].empty() ? "unknown" : values["model name"];
  if (values["cpu family"].empty() || values["model"].empty()) return name;
  return fmt::format("{} (family {}, model {})", name, values["cpu family"], values["model"]);
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

/// Runnable threads on the machine, averaged over the last minute.
double load() {
  double average = 0;
  ::getloadavg(&average, 1);
  return average;
}

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

/// What the engine of the CPU computes with; its threads, which a description ends with, stand
/// apart.
std::string paths(Device device) {
  const std::string description = description_of(device);
  return description.substr(0, description.rfind(", "));
}

/// Where is measured, and by what.
ordered_json machine(Device device, int threads) {
  ordered_json m = {{"cpu", cpu_model()}};
  if (device.type == DeviceType::kCuda) {
    m["device"] = description_of(device);
  } else {
    m["simd"] = paths(device);
    m["threads"] = threads;
    m["compiler"] = kCompiler;
  }
  m["fulgur"] = FULGUR_VERSION;
  m["load_before"] = load();
  m["time"] = utc_now();
  return m;
}

std::string in_words(const ordered_json& machine) {
  if (machine.contains("device")) return machine["device"].get<std::string>();
  return fmt::format("{}, {}, {} threads, {}", machine["cpu"].get<std::string>(),
                     machine["simd"].get<std::string>(), machine["threads"].get<int>(),
                     machine["compiler"].get<std::string>());
}

/// Peaks of the machine. Those of a GPU's flops are unknown, as only a kernel could measure them.
struct Peaks {
  double flops_1 = 0, flops_all = 0, bandwidth = 0;

  static Peaks measured(Device device, int threads) {
    if (device.type == DeviceType::kCuda) return {0, 0, bench::copy_bandwidth(device.index)};
    return {bench::fma_peak(1), bench::fma_peak(threads), bench::read_bandwidth(threads)};
  }
  static Peaks median_of(const std::vector<Peaks>& all) {
    const auto median_of = [&](double Peaks::*peak) {
      std::vector<double> values;
      for (const Peaks& p : all) values.push_back(p.*peak);
      return median(values);
    };
    return {median_of(&Peaks::flops_1), median_of(&Peaks::flops_all), median_of(&Peaks::bandwidth)};
  }

  ordered_json json(Device device) const {
    if (device.type == DeviceType::kCuda) return {{"copy_gbytes_per_s", bandwidth * 1e-9}};
    return {{"fma_gflop_per_s_1_thread", flops_1 * 1e-9},
            {"fma_gflop_per_s_all_threads", flops_all * 1e-9},
            {"read_gbytes_per_s_all_threads", bandwidth * 1e-9}};
  }
  std::string in_words(Device device, int threads) const {
    if (device.type == DeviceType::kCuda) {
      return fmt::format("copies within the device's memory read and write {:.0f} GB/s",
                         bandwidth * 1e-9);
    }
    return fmt::format(
        "f32 FMA peak {:.1f} GFLOP/s on 1 thread, {:.1f} on {}; memory read {:.1f} GB/s",
        flops_1 * 1e-9, flops_all * 1e-9, threads, bandwidth * 1e-9);
  }
};

/// What was measured of a case.
struct Times {
  double seconds = 0;       ///< of a call
  double first = 0;         ///< of planning and the first call
  int64_t extra_bytes = 0;  ///< of memory, besides the inputs
  ordered_json counts;      ///< of a paper's algorithm
};

/// What the kernels of a paper's algorithm move and compute, but for what depends on the scores.
ordered_json counts_of(const Details& plan) {
  ordered_json counts;
  for (const std::string name :
       {"bytes_read", "bytes_written", "products", "exponentials", "rescales"}) {
    if (const std::string path = "counts." + name; plan.has(path))
      counts[name] = plan.get<int64_t>(path);
  }
  return counts;
}

/// `work` counts bytes of decode, flops otherwise.
ordered_json result(const bench::Case& c, double work, const Times& times, const Peaks& peaks) {
  const bool cuda = c.device.type == DeviceType::kCuda;
  ordered_json row = {{"pass", c.pass},    {"dtype", name_of(c.dtype)},
                      {"batch", c.batch},  {"sq", c.sq},
                      {"sk", c.sk},        {"hq", c.hq},
                      {"hk", c.hk},        {"d", c.d},
                      {"causal", c.causal}};
  if (cuda) {
    row["device"] = name_of(c.device);
  } else {
    row["threads"] = c.threads;
    row["first_ms"] = 1e3 * times.first;
  }
  row["ms"] = 1e3 * times.seconds;
  row["extra_bytes"] = times.extra_bytes;
  const double rate = work / times.seconds;
  if (c.pass == "decode") {
    row["page"] = c.page;
    row["prefix"] = c.prefix;
    row["uneven"] = c.uneven;
    row["gbytes_per_s"] = rate * 1e-9;
    row[cuda ? "percent_of_copy_bandwidth" : "percent_of_read_bandwidth"] =
        100 * rate / peaks.bandwidth;
    return row;
  }
  row["gflop_per_s"] = rate * 1e-9;
  if (!c.algorithm.empty()) row["algorithm"] = c.algorithm;
  if (!times.counts.is_null()) row["counts"] = times.counts;
  if (cuda) return row;
  row["percent_of_fma_peak"] = 100 * rate / (c.threads == 1 ? peaks.flops_1 : peaks.flops_all);
  return row;
}

/// The cases that the engine computes and memory holds, and why not the others.
struct Measured {
  std::vector<bench::Case> cases;
  ordered_json rows = ordered_json::array();
  Peaks peaks;
  std::map<std::string, std::vector<std::string>> not_computed;  ///< names by reason
};

/// Cases and probes take turns, so that what disturbs the machine for some seconds touches few of
/// the times of a case; medians over the rounds. So do as many cases as memory holds together; of
/// one round each has the memory alone, and none begins after `seconds_of_all`.
Measured measure(const std::vector<bench::Case>& cases, int rounds, Device device, int threads,
                 double seconds_of_all) {
  Measured measured;
  const auto start = std::chrono::steady_clock::now();
  const auto is_over = [&] {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    return rounds == 1 && !measured.cases.empty() && passed.count() > seconds_of_all;
  };
  std::vector<Peaks> peaks;
  std::vector<double> work;
  std::vector<Times> times;
  Progress progress("bench", rounds * static_cast<int64_t>(cases.size()));
  for (auto next = cases.begin(); next != cases.end() && !is_over();) {
    std::deque<bench::Workload> workloads;
    for (; next != cases.end() && (rounds > 1 || workloads.empty()); ++next) {
      try {
        workloads.emplace_back(*next);
        measured.cases.push_back(*next);
      } catch (const Error& error) {
        const bool memory = error.status() == Status::kOutOfMemory;
        if (memory && !workloads.empty()) break;
        if (!memory && error.status() != Status::kUnsupported) throw;
        const std::string why = memory ? "they do not fit into the free memory" : error.what();
        measured.not_computed[why].push_back(next->name());
        for (int round = 0; round < rounds; ++round) progress.step();
      }
    }
    std::vector<std::vector<double>> seconds(workloads.size());
    std::vector<double> first;
    for (const bench::Workload& w : workloads) first.push_back(w.plan_seconds() + timed(w, 1));
    for (int round = 0; round < rounds; ++round) {
      peaks.push_back(Peaks::measured(device, threads));
      for (size_t i = 0; i < workloads.size(); ++i) {
        seconds[i].push_back(burst_seconds(workloads[i], device));
        progress.step();
      }
    }
    for (size_t i = 0; i < workloads.size(); ++i) {
      const bench::Case& c = measured.cases[work.size()];
      work.push_back(c.pass == "decode" ? c.bytes() : workloads[i].flops());
      times.push_back({median(seconds[i]), first[i], workloads[i].extra_bytes(),
                       counts_of(workloads[i].details())});
    }
  }
  measured.peaks = Peaks::median_of(peaks);
  for (size_t i = 0; i < times.size(); ++i) {
    measured.rows.push_back(result(measured.cases[i], work[i], times[i], measured.peaks));
  }
  return measured;
}

/// The name is as wide as the longest of the table.
void print(const bench::Case& c, size_t width, const ordered_json& row) {
  const auto value = [&](const char* name) { return row[name].get<double>(); };
  const bool cuda = c.device.type == DeviceType::kCuda;
  std::string speed;
  if (c.pass == "decode" && cuda) {
    speed = fmt::format("{:>8.0f} GB/s    {:>5.1f}% of copies", value("gbytes_per_s"),
                        value("percent_of_copy_bandwidth"));
  } else if (c.pass == "decode") {
    speed = fmt::format("{:>8.1f} GB/s    {:>5.1f}% of read bandwidth", value("gbytes_per_s"),
                        value("percent_of_read_bandwidth"));
  } else if (cuda) {
    speed = fmt::format("{:>8.1f} TFLOP/s", value("gflop_per_s") * 1e-3);
  } else {
    speed = fmt::format("{:>8.1f} GFLOP/s {:>5.1f}% of FMA peak", value("gflop_per_s"),
                        value("percent_of_fma_peak"));
  }
  fmt::print("{:<{}} {:>10.3f} ms {}\n", c.name(), width, value("ms"), speed);
}

/// Causal against full and all threads against one, where the grid has both.
void print_ratios(const std::vector<bench::Case>& cases, const ordered_json& rows) {
  const auto compare = [&](const char* what, auto is_base, auto change) {
    for (size_t i = 0; i < cases.size(); ++i) {
      if (!is_base(cases[i])) continue;
      const auto other = std::find_if(cases.begin(), cases.end(), [&](const bench::Case& c) {
        return c.name() == change(cases[i]).name();
      });
      if (other == cases.end()) continue;
      const size_t j = static_cast<size_t>(other - cases.begin());
      fmt::print("{:<45} {:.2f}x as fast {}\n", cases[i].name(),
                 rows[i]["ms"].get<double>() / rows[j]["ms"].get<double>(), what);
    }
  };
  compare(
      "when causal", [](const bench::Case& c) { return !c.causal && c.pass != "decode"; },
      [](bench::Case c) {
        c.causal = true;
        return c;
      });
  const int threads = bench::all_threads();
  const bool cuda = !cases.empty() && cases[0].device.type == DeviceType::kCuda;
  if (threads == 1 || cuda) return;
  compare(
      fmt::format("on {} threads", threads).c_str(),
      [](const bench::Case& c) { return c.threads == 1; },
      [&](bench::Case c) {
        c.threads = threads;
        return c;
      });
}

/// The rows of a report on a paper's cases: a line for each algorithm and pass, TFLOP/s by
/// length, the memory that the passes take besides their inputs, and what both move and compute.
class PaperTables {
 public:
  explicit PaperTables(const ordered_json& rows) {
    for (const ordered_json& row : rows) {
      const auto value = [&](const char* name) { return row[name].get<double>(); };
      const int64_t n = row["sk"];
      Cell& cell = tables_[{row["d"], row["causal"]}][row["algorithm"]][n];
      Pass& pass = row["pass"] == "forward" ? cell.forward : cell.backward;
      pass = {1e-3 * value("gflop_per_s"), value("ms"), value("extra_bytes"),
              row.value("counts", ordered_json::object())};
      lengths_.insert(n);
    }
  }

  void print() const {
    for (const auto& [table, algorithms] : tables_) {
      fmt::print("\nd {}, {}: TFLOP/s by sequence length\n{:<28}", table.first,
                 table.second ? "causal" : "full", "");
      for (const int64_t n : lengths_) fmt::print("{:>9}", n);
      fmt::print("\n");
      for (const char* const what : {"forward", "backward", "both", "memory, MB", "moved, GB",
                                     "products, G", "exp, G", "rescales, M"}) {
        for (const auto& [algorithm, cells] : algorithms) {
          std::string line;
          bool any = false;
          for (const int64_t n : lengths_) {
            const auto found = cells.find(n);
            const double x = found == cells.end() ? 0 : found->second.value(what);
            line += fmt::format("{:>9}", x == 0 ? "-" : fmt::format("{:.{}f}", x, x < 10 ? 1 : 0));
            any = any || x != 0;
          }
          if (any) fmt::print("{:<16} {:<11}{}\n", what, algorithm, line);
        }
      }
    }
    print_ratios();
  }

 private:
  struct Pass {
    double tflops = 0, ms = 0, bytes = 0;
    ordered_json counts;
    double work() const { return tflops * ms; }
  };
  struct Cell {
    Pass forward, backward;

    double both() const {
      if (forward.ms == 0 || backward.ms == 0) return 0;
      return (forward.work() + backward.work()) / (forward.ms + backward.ms);
    }
    double value(std::string_view what) const {
      if (what == "forward") return forward.tflops;
      if (what == "backward") return backward.tflops;
      if (what == "both") return both();
      if (what == "memory, MB") return 1e-6 * std::max(forward.bytes, backward.bytes);
      if (what == "moved, GB") return 1e-9 * (counted("bytes_read") + counted("bytes_written"));
      if (what == "products, G") return 1e-9 * counted("products");
      return what == "exp, G" ? 1e-9 * counted("exponentials") : 1e-6 * counted("rescales");
    }
    /// Of both passes; 0 where one has not been counted.
    double counted(const char* name) const {
      const bool known = forward.counts.contains(name) && backward.counts.contains(name);
      return known ? forward.counts[name].get<double>() + backward.counts[name].get<double>() : 0;
    }
  };
  using Cells = std::map<int64_t, Cell>;

  /// What the papers say of the algorithms: how much faster each is than another, both passes.
  void print_ratios() const {
    fmt::print("\nboth passes, how much faster, over all lengths, dims and masks\n");
    for (const auto& [faster, slower] : {std::pair{"fa1", "standard"}, std::pair{"fa2", "standard"},
                                         std::pair{"fa2", "fa1"}, std::pair{"fa3", "fa2"}}) {
      std::vector<double> ratios;
      for (const auto& [table, algorithms] : tables_) {
        const auto a = algorithms.find(faster), b = algorithms.find(slower);
        if (a == algorithms.end() || b == algorithms.end()) continue;
        for (const auto& [n, cell] : a->second) {
          const auto other = b->second.find(n);
          if (other == b->second.end() || other->second.both() == 0) continue;
          ratios.push_back(cell.both() / other->second.both());
        }
      }
      if (ratios.empty()) continue;
      const auto [least, most] = std::ranges::minmax(ratios);
      fmt::print("{:<9} than {:<9} {:.2f} to {:.2f}, median {:.2f}\n", faster, slower, least, most,
                 median(ratios));
    }
  }

  std::map<std::pair<int64_t, bool>, std::map<std::string, Cells>> tables_;
  std::set<int64_t> lengths_;
};

struct BenchRequest {
  int ranks = 0;
  double seconds = std::numeric_limits<double>::infinity();
  bool continues = false;
  std::string grid = "quick", device = "cpu", json, paper;
  std::vector<std::string> only;
};

std::vector<bench::Case> cases_of(const BenchRequest& r, Device device, int threads) {
  const std::vector<bench::Case> cases = !r.paper.empty()     ? bench::paper_grid(r.paper, device)
                                         : r.grid == "decode" ? bench::decode_grid(threads, device)
                                         : device.type == DeviceType::kCuda
                                             ? bench::cuda_grid(r.grid, device)
                                             : bench::cpu_grid(r.grid, threads);
  return r.only.empty() ? cases : bench::only(cases, r.only);
}

/// The rows that a report on the same paper and GPU has already.
ordered_json rows_of_before(const BenchRequest& r, const ordered_json& machine) {
  if (!r.continues || !std::filesystem::exists(r.json)) return ordered_json::array();
  const io::InputFile file(r.json, "--json");
  ordered_json report = ordered_json::parse(file.bytes(), nullptr, /*allow_exceptions=*/false);
  if (!report.is_object()) report = ordered_json::object();
  const auto text_of = [](const ordered_json& of, const char* name) -> std::string {
    const bool there = of.is_object() && of.contains(name) && of[name].is_string();
    return there ? of[name].get<std::string>() : "nothing";
  };
  const auto want = [&](const char* what, const std::string& got, const std::string& wanted) {
    if (got != wanted) {
      io::fail("--continue", "got {} whose {} is {}, want a report of {}", r.json, what, got,
               wanted);
    }
  };
  want("grid", text_of(report, "grid"), r.paper);
  want("device", text_of(report["machine"], "device"), machine["device"]);
  return report["results"].is_array() ? report["results"] : ordered_json::array();
}

/// Whether a row is that of a case of a paper.
bool is_row_of(const ordered_json& row, const bench::Case& c) {
  return row["pass"] == c.pass && row["sk"] == c.sk && row["d"] == c.d &&
         row["causal"] == c.causal && row["algorithm"] == c.algorithm;
}

void write_json(const std::string& path, const ordered_json& report) {
  if (path.empty()) return;
  const std::string text = report.dump(1) + "\n";
  const io::Bytes pieces[] = {std::as_bytes(std::span(text))};
  io::OutputFiles files;
  files.add(path, pieces);
  files.commit();
}

/// Processes that compute together, compared with this one, which has the threads of all of them,
/// or one of their GPUs.
void bench_ranks(const BenchRequest& r) {
  if (!r.json.empty()) io::check_writable(r.json);
  const bool cuda = r.device == "cuda";
  const Device first{cuda ? DeviceType::kCuda : DeviceType::kCpu, 0};
  const int threads = bench::all_threads();
  std::vector<bench::Case> cases = cases_of(r, first, threads);
  std::erase_if(cases, [&](const bench::Case& c) {
    return c.pass == "decode" || (!cuda && c.threads != threads);
  });
  if (cases.empty()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("--ranks: no shape is of forward or backward by {} threads", threads));
  }
  RankProcesses ranks(r.ranks, cases);  // before this process has a GPU, or threads
  const Device device = device_called(r.device, "--device " + r.device);
  ordered_json report = {{"machine", machine(device, threads)}, {"ranks", r.ranks}};
  fmt::print("fulgur {}, {}\n", FULGUR_VERSION, in_words(report["machine"]));
  constexpr int kRounds = 3;
  constexpr double kSeconds = 0.2;
  Progress progress("bench", kRounds * std::ssize(cases));
  size_t width = 45;
  for (const bench::Case& c : cases) width = std::max(width, c.name().size());
  for (const bench::Case& c : cases) {
    ranks.next();
    const bench::Workload alone(c);
    std::vector<double> one, all;
    for (int round = 0; round < kRounds; ++round) {
      one.push_back(burst_seconds(alone, device));
      all.push_back(ranks.seconds(std::clamp(static_cast<int>(kSeconds / one.back()), 1, 100)));
      progress.step();
    }
    const double by_one = median(one), by_all = median(all), speedup = by_one / by_all;
    fmt::print("{:<{}} {:>10.3f} ms by {} {}, {:>10.3f} ms by one: {:.2f}x\n", c.name(), width,
               1e3 * by_all, r.ranks, cuda ? "GPUs" : "ranks", 1e3 * by_one, speedup);
    report["results"].push_back({{"shape", c.name()},
                                 {"ms", 1e3 * by_all},
                                 {"ms_of_one", 1e3 * by_one},
                                 {"gflop_per_s", 1e-9 * alone.flops() / by_all},
                                 {"speedup", speedup}});
  }
  write_json(r.json, report);
}

void run_bench(const BenchRequest& r) {
  if (r.ranks > 0) return bench_ranks(r);
  const Device device = device_called(r.device, "--device " + r.device);
  if (!r.paper.empty() && device.type != DeviceType::kCuda) {
    throw Error(Status::kInvalidArgument,
                "--reproduce: given for the CPU, want --device cuda: its algorithm is fa2");
  }
  if (!r.json.empty()) io::check_writable(r.json);
  const int threads = bench::all_threads();
  std::vector<bench::Case> cases = cases_of(r, device, threads);
  ordered_json report = {{"machine", machine(device, threads)}};
  const auto& m = report["machine"];
  fmt::print("fulgur {}, {}\n", FULGUR_VERSION, in_words(m));
  if (const double before = m["load_before"].get<double>(); before > 0.5) {
    fmt::print("note: other work runs on this machine (load average {:.1f}); expect lower speeds\n",
               before);
  }
  const int rounds = !r.paper.empty() ? 1 : r.grid == "standard" ? 5 : 3;
  ordered_json before = rows_of_before(r, m);
  std::erase_if(cases, [&](const bench::Case& c) {
    return std::ranges::any_of(before, [&](const auto& row) { return is_row_of(row, c); });
  });
  if (cases.empty()) throw Error(Status::kInvalidArgument, r.json + " has all of these shapes");
  Measured measured = measure(cases, rounds, device, threads, r.seconds);
  report["peaks"] = measured.peaks.json(device);
  fmt::print("measured: {}\n", measured.peaks.in_words(device, threads));
  if (!r.paper.empty()) {
    measured.rows.insert(measured.rows.begin(), before.begin(), before.end());
    PaperTables(measured.rows).print();
    size_t found = measured.cases.size();
    for (const auto& [why, names] : measured.not_computed) found += names.size();
    if (found < cases.size())
      fmt::print("\nafter {} seconds {} shapes are left\n", r.seconds, cases.size() - found);
  }
  size_t width = 45;
  for (const bench::Case& c : measured.cases) width = std::max(width, c.name().size());
  for (size_t i = 0; i < measured.cases.size() && r.paper.empty(); ++i) {
    print(measured.cases[i], width, measured.rows[i]);
  }
  if (r.paper.empty()) print_ratios(measured.cases, measured.rows);
  report["grid"] = r.paper.empty() ? r.grid : r.paper;
  report["results"] = std::move(measured.rows);
  report["not_computed"] = ordered_json::array();
  for (const auto& [why, names] : measured.not_computed) {
    fmt::print("not computed, {} shapes ({} ...): {}\n", names.size(), names[0], why);
    report["not_computed"].push_back({{"why", why}, {"shapes", names}});
  }
  write_json(r.json, report);
}

}  // namespace

void add_bench(CLI::App& app) {
  auto r = std::make_shared<BenchRequest>();
  auto* command = app.add_subcommand(
      "bench", "The speed of the engine with the peaks of this machine, measured in the run");
  command->add_option("--grid", r->grid, "Which shapes; default quick")
      ->check(CLI::IsMember({"quick", "standard", "decode"}))
      ->type_name("G");
  command
      ->add_option("--reproduce", r->paper,
                   "Instead the tables of a paper: FlashAttention, -2 or -3, on one GPU")
      ->check(CLI::IsMember({"fa1", "fa2", "fa3"}))
      ->type_name("P")
      ->excludes("--grid");
  command
      ->add_option("--only", r->only,
                   "Only the shapes whose names have these parts, of each kind one")
      ->type_name("PART");
  add_device(*command, r->device, "The engine of which device; default cpu");
  add_whole(*command, "--ranks", r->ranks,
            "So many processes of this machine that compute together, compared with one that has "
            "the threads of all, or one GPU",
            1)
      ->excludes("--reproduce");
  auto* json = command->add_option("--json", r->json, "Write the results to this file too")
                   ->type_name("F.json");
  command
      ->add_flag("--continue", r->continues,
                 "Keep what F.json has of the paper, and measure what it does not have")
      ->needs("--reproduce")
      ->needs(json);
  command
      ->add_option("--seconds", r->seconds,
                   "Of a paper begin no further shape after so many; default all")
      ->check(CLI::PositiveNumber)
      ->type_name("S")
      ->needs("--reproduce");
  command->footer(
      "Times are medians over rounds in which the shapes take turns. Flops count the matrix "
      "products of the visible scores; the bytes of decode are those of K and V that exist, shared "
      "prefixes once, q and out.\n"
      "On a GPU a time is that of a launch among many. The decode grid is a thousand shapes of "
      "serving, over caches too; those that do not fit into the free memory are left out.\n"
      "Examples:\n"
      "  fulgur bench\n"
      "  OMP_NUM_THREADS=1 fulgur bench --grid standard --json speed.json\n"
      "  fulgur bench --device cuda --grid standard\n"
      "  fulgur bench --device cuda --reproduce fa2\n"
      "  fulgur bench --device cuda --reproduce fa3 --seconds 60 --json fa3.json --continue\n"
      "  fulgur bench --ranks 2\n"
      "  fulgur bench --grid decode --only batch:8 keys:4096 hq:32 hk:8 page:none");
  command->callback([r] { run_bench(*r); });
}

}  // namespace fulgur::app
