#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "fulgur/export.h"

namespace fulgur {

/// What a step of all ranks brings: sends[r] goes to rank r, receives[r] comes from there. All know
/// their sizes; what a rank has for itself is empty. It throws where a rank has left.
using Exchange = std::function<void(std::span<const std::span<const std::byte>> sends,
                                    std::span<const std::span<std::byte>> receives)>;

/// The processes that compute together. A handle; copies share it. All ranks make the same calls of
/// a group in one order. Once a rank leaves or hangs, each call throws Error(kUnavailable) that
/// names it, and so does every later one: the group is dead.
class FULGUR_API Group {
 public:
  struct Impl;
  static constexpr double kDeadline = 300;  ///< seconds without progress after which a rank hangs

  /// By sockets between all processes that torchrun, mpirun (Open MPI, MPICH) or srun has started:
  /// RANK and WORLD_SIZE, or OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID and their sizes. Rank 0
  /// listens at MASTER_ADDR (127.0.0.1) and FULGUR_PORT, or MASTER_PORT + 1 (29511). A single
  /// process without any of them is a group of its own.
  static Group from_env(double deadline = kDeadline);
  /// The same; rank 0 listens there. Any process that can connect to the port may join: for trusted
  /// networks only.
  static Group connect(int rank, int ranks, const std::string& host, int port,
                       double deadline = kDeadline);
  /// By an ncclComm_t of the caller, whose GPU this process computes on, of one machine or several:
  /// rows and what ranks say go by NCCL. It stays the caller's, and lives longer than the group; a
  /// step that takes more than `deadline` seconds, or a rank that leaves, aborts it.
  static Group from_nccl(void* comm, double deadline = kDeadline);
  /// By the caller's function.
  static Group from_exchange(int rank, int ranks, Exchange exchange);
  /// This process alone, which computes what a rank of so many would, to measure it: the rows of
  /// the others are its own, as many, where they would lie.
  static Group simulated(int rank, int ranks);

  explicit Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  int rank() const;
  int size() const;
  /// Why the group is dead; "" while it is not.
  std::string dead() const;
  Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace fulgur
