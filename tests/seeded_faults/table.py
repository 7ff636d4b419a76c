"""Faults that are put into the product one by one, and the tests that must notice each: a table, no code that acts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rust:
    """Tests of one crate, by parts of their names."""

    crate: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Python:
    """Tests that pytest runs: `file::test`, below `tests`."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Ranks:
    """Tests below `tests/parallel`, which `make test` runs inside ranks."""

    nodes: tuple[str, ...]
    np: int = 3
    environment: str = ""
    """Of the folder's `environments.json`."""


Tests = Rust | Python | Ranks


@dataclass(frozen=True)
class Fault:
    """One fault: the text `old`, which stands in `file` once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    does: str
    tests: Tests
    """Those of `make test` that are expected to fail."""

    @property
    def needs_wheel(self) -> bool:
        """Whether the tests see the fault only in a wheel that is built with it."""
        return self.file.startswith("crates/") and not isinstance(self.tests, Rust)


TORCH = "parallel/torch"
TABLE = f"{TORCH}/test_optimizer_table.py::test_training_equals_that_of_one_process"
RESUMED = f"{TORCH}/test_torch_checkpoint.py::test_a_training_goes_on_from_the_file_as_if_it_had_not_ended"

FAULTS = (
    # ---- Python, for all frameworks
    Fault(
        "checkpoint-of-its-own",
        "python/horovod/common/_checkpoint.py",
        "            self._state.sync()\n",
        "            pass\n",
        "only rank 0 goes on from a checkpoint",
        Ranks((RESUMED,)),
    ),
    Fault(
        "wrong-op-resolved",
        "python/horovod/common/_ops.py",
        "return Average if average else Sum",
        "return Sum if average else Average",
        "average=True sums and average=False averages",
        Python(("unit/test_common.py::test_average_and_op",)),
    ),
    Fault(
        "postscale-forgotten-in-python",
        "python/horovod/common/_reduction.py",
        "factors = (1.0 / predivide_factor, predivide_factor) if",
        "factors = (1.0 / predivide_factor, 1.0) if",
        "gradients stay divided by gradient_predivide_factor",
        Ranks((f"{TABLE}[predivided, defaults]",)),
    ),
    Fault(
        "commit-not-saved",
        "python/horovod/common/elastic.py",
        "        self.save()\n        self._commits += 1\n",
        "        self._commits += 1\n",
        "state.commit() counts a commit and saves nothing",
        Ranks(
            (
                f"{TORCH}/test_elastic_loop.py::test_a_failure_goes_back_to_the_last_commit_and_events_come_in_order",
            )
        ),
    ),
    Fault(
        "oldest-commit-kept",
        "python/horovod/common/elastic.py",
        "(states[r][0] > 0, *states[r][::-1], -r)",
        "(states[r][0] > 0, -states[r][1], states[r][0], -r)",
        "ranks go on from the oldest commit that one of them has",
        Ranks((f"{TORCH}/test_elastic_loop.py::test_the_newest_commit_of_any_rank_is_kept",)),
    ),
    Fault(
        "drift-of-the-first-tensor-unseen",
        "python/horovod/common/consistency.py",
        "        if len(sums) > 1:\n            sides = tuple(",
        "        if len(sums) > 1 and index > 0:\n            sides = tuple(",
        "the divergence watch does not report the first tensor",
        Ranks((f"{TORCH}/test_consistency.py::test_tensors_are_compared_on_request",)),
    ),
    Fault(
        "dropped-gradients-not-counted",
        "python/horovod/common/_gradient_presence.py",
        "        self._drops += 1\n",
        "        self._drops += 0\n",
        "a batch that only some ranks skip is not reported",
        Ranks((f"{TORCH}/test_optimizer_passes.py::test_ranks_at_different_steps_are_told",)),
    ),
    Fault(
        "results-of-the-wrong-rank",
        "python/horovod/runner/_launching.py",
        "[cloudpickle.loads(returned[rank]) for rank in range(wanted)]",
        "[cloudpickle.loads(returned[rank]) for rank in reversed(range(wanted))]",
        "horovod.run returns the results in the opposite order of ranks",
        Python(
            (
                "integration/test_run_function.py::"
                "test_results_come_in_the_order_of_ranks_and_output_to_the_callers_streams",
            )
        ),
    ),
    Fault(
        "wrong-set-found",
        "python/horovod/common/process_sets.py",
        "        if _core.process_set_ranks(number) == list(ranks):",
        "        if len(_core.process_set_ranks(number)) == len(ranks):",
        "a process set gets the id of another one of as many ranks",
        Ranks((f"{TORCH}/test_process_sets.py::test_sets_come_and_go",)),
    ),
    Fault(
        "objects-from-the-wrong-place",
        "python/horovod/common/_objects.py",
        "parts = [data[end - abs(size) : end] for size, end in zip(sizes, ends, strict=True)]",
        "parts = [data[end - abs(size) : end] for size, end in zip(sizes, ends, strict=True)][::-1]",
        "allgather_object gives the objects in the opposite order of ranks",
        Ranks((f"{TORCH}/test_state.py::test_objects_are_gathered_in_the_order_of_ranks",)),
    ),
    Fault(
        "sampler-counts-one-rank-too-few",
        "python/horovod/common/_sampler.py",
        "self.processed_num += batch_size * self.num_replicas",
        "self.processed_num += batch_size * max(1, self.num_replicas - 1)",
        "samples are repeated after a change of members",
        Python(
            (
                "unit/test_elastic_sampler.py::"
                "test_nothing_is_lost_or_repeated_when_the_number_of_ranks_changes",
            )
        ),
    ),
    Fault(
        "loader-swallows-errors",
        "python/horovod/data/data_loader_base.py",
        "        except BaseException as error:\n            self._error = error\n",
        "        except BaseException:\n            pass\n",
        "an error while batches are read ahead ends the epoch as if all were read",
        Python(("unit/test_data_loader.py::test_an_error_is_raised_after_the_batches_before_it",)),
    ),
    # ---- adapters
    Fault(
        "gradient-sent-twice",
        "python/horovod/torch/_gradient_sending.py",
        "            queued = queued[len(handles) :]\n",
        "            queued = queued[max(0, len(handles) - 1) :]\n",
        "the last gradient of each hand-over is reduced a second time",
        Ranks((f"{TABLE}[gradients are averaged, named=True]",)),
    ),
    Fault(
        "sparse-index-offset",
        "python/horovod/torch/_sparse.py",
        "    positions = own._indices().t()\n",
        "    positions = own._indices().t().clamp(min=1)\n",
        "entries of row 0 are added to row 1",
        Ranks((f"{TORCH}/test_sparse.py::test_entries_add_up",)),
    ),
    Fault(
        "wrong-divisor-in-sync-batch-norm",
        "python/horovod/torch/sync_batch_norm.py",
        "                unbiased = var * (count / (count - 1))\n",
        "                unbiased = var\n",
        "the running variance is the biased one",
        Ranks(
            (
                f"{TORCH}/test_sync_batch_norm.py::test_training_equals_one_process_on_the_whole_batch",
            )
        ),
    ),
    Fault(
        "optimizer-tensors-not-broadcast",
        "python/horovod/torch/_optimizer_state.py",
        "        for name, tensor in tensors\n    ]\n    wait_for_all(handles)\n",
        "        for name, tensor in tensors[1:]\n    ]\n    wait_for_all(handles)\n",
        "the first tensor of an optimizer's state is not broadcast",
        Ranks((f"{TORCH}/test_state.py::test_optimizer_state_becomes_the_roots",)),
    ),
    Fault(
        "wrong-root-of-a-gradient",
        "python/horovod/tensorflow/_gradients.py",
        'is_root = tf.equal(ops.rank_op(), op.get_attr("root_rank"))',
        "is_root = tf.equal(ops.rank_op(), 0)",
        "rank 0 gets the gradient of every broadcast",
        Ranks(
            (
                "parallel/tensorflow/test_ops_gradients.py::test_broadcast_gives_the_average_to_the_root",
            ),
            environment="tensorflow",
            np=2,
        ),
    ),
    Fault(
        "wrong-splits-of-a-gradient",
        "python/horovod/tensorflow/_gradients.py",
        "ops.alltoall(grad, splits=op.outputs[1], **_scope_of(op))",
        "ops.alltoall(grad, splits=op.outputs[1][::-1], **_scope_of(op))",
        "gradients of an alltoall go back to the wrong ranks",
        Ranks(
            ("parallel/tensorflow/test_ops_gradients.py::test_alltoall_sends_the_gradients_back",),
            environment="tensorflow",
            np=2,
        ),
    ),
    Fault(
        "optimizer-not-broadcast-by-keras",
        "python/horovod/_keras/callbacks.py",
        "        if optimizer is not None:\n            _variables.broadcast(\n",
        "        if optimizer is None:\n            _variables.broadcast(\n",
        "BroadcastGlobalVariablesCallback leaves out the optimizer",
        Ranks(
            (
                "parallel/keras/test_callbacks.py::test_broadcast_gives_all_the_roots_weights_and_optimizer_state",
            ),
            environment="keras-torch",
            np=2,
        ),
    ),
    Fault(
        "accumulated-gradients-not-cleared",
        "python/horovod/jax/optimizer.py",
        "            zeros = jax.tree.map(jnp.zeros_like, added)\n            return updates,",
        "            zeros = added\n            return updates,",
        "gradients of one step are added to those of the next",
        Ranks(
            ("parallel/jax/test_jax_training.py::test_several_backward_passes_per_step",),
            environment="jax",
        ),
    ),
    Fault(
        "wrong-divisor-in-mxnet",
        "python/horovod/mxnet/optimizer.py",
        "self.rescale = predivide / (process_set.size() or 1) if self.is_active else 1.0",
        "self.rescale = 1.0 / (process_set.size() or 1) if self.is_active else 1.0",
        "gradients stay divided by gradient_predivide_factor",
        Python(("test_mxnet.py::test_on_every_rank",)),
    ),
    Fault(
        "aggregated-gradients-not-cleared",
        "python/horovod/tensorflow/gradient_aggregation_eager.py",
        "            total.assign(tf.zeros_like(total))\n",
        "            total.assign(tf.identity(total))\n",
        "gradients of one step are added to those of the next",
        Ranks(
            (
                "parallel/tensorflow/test_tf_v1_optimizers.py::test_the_keras_helper_sums_up_eagerly_and_in_functions",
            ),
            environment="tensorflow",
            np=2,
        ),
    ),
    Fault(
        "warm-up-one-batch-late",
        "python/horovod/_keras/callbacks.py",
        "            epoch += 1.0 / (self.steps_per_epoch or 1)\n",
        "            epoch += 0.0\n",
        "the last batch of the warm-up does not reach the full learning rate",
        Ranks(("parallel/keras/test_callbacks.py::test_warmup",), environment="keras-torch", np=2),
    ),
    # ---- clusters
    Fault(
        "row-read-twice",
        "python/horovod/spark/common/row_reader.py",
        "first, last = total * rank // size, total * (rank + 1) // size",
        "first, last = total * rank // size, min(total, total * (rank + 1) // size + 1)",
        "the share of an estimator's rank begins with the last row of the one before",
        Python(("unit/test_row_sharding.py::test_shares_differ_by_one_row_at_most",)),
    ),
    Fault(
        "ray-swallows-errors",
        "python/horovod/ray/_results.py",
        "            failures.append((place, error))\n",
        "            values[place] = None\n",
        "a function that raises on a rank has the result None",
        Python(("integration/test_ray.py::test_an_error_names_the_rank",)),
    ),
    # ---- kernels and collectives
    Fault(
        "off-by-one-in-a-kernel",
        "crates/horovod-kernels/src/blocks.rs",
        "unsafe fn zip_into<E: Element, O: Binary<E>>(\n"
        "    a: *const E::Acc,\n    b: *const E::Acc,\n    acc: *mut E::Acc,\n    n: usize,\n) {\n"
        "    for i in 0..n {\n",
        "unsafe fn zip_into<E: Element, O: Binary<E>>(\n"
        "    a: *const E::Acc,\n    b: *const E::Acc,\n    acc: *mut E::Acc,\n    n: usize,\n) {\n"
        "    // SAFETY: as below.\n    unsafe { acc.write_bytes(0, n) };\n"
        "    for i in 0..n.saturating_sub(1) {\n",
        "the last element of each block is not added",
        Rust("horovod-kernels", ("every_length_up_to_three_vectors_and_around_a_block",)),
    ),
    Fault(
        "bias-in-adasum",
        "crates/horovod-kernels/src/adasum.rs",
        "1.0 - sums.dot / (2.0 * norm)",
        "1.0 - sums.dot / norm",
        "two equal gradients cancel each other",
        Rust("horovod-kernels", ("orthogonal_gradients_add_and_equal_ones_average",)),
    ),
    Fault(
        "end-of-an-allgather-dropped",
        "crates/horovod-collectives/src/allgather.rs",
        "steps: longest.div_ceil(chunk),",
        "steps: longest / chunk,",
        "what does not fill a chunk is not gathered",
        Rust("horovod-collectives", ("allgather_concatenates_uneven_and_empty_contributions",)),
    ),
    Fault(
        "wrong-counts-in-alltoall",
        "crates/horovod-collectives/src/alltoall.rs",
        "Ok(rows) if to == me => *mine = rows,",
        "Ok(rows) if to == from => *mine = rows,",
        "a rank takes what a peer keeps for what that peer sends",
        Rust("horovod-collectives", ("alltoall_delivers_every_block",)),
    ),
    # ---- negotiation
    Fault(
        "stale-cache-slot",
        "crates/horovod-protocol/src/worker/apply.rs",
        "                entry.cached = None;\n                self.forget_if_unused(index);\n",
        "                self.forget_if_unused(index);\n",
        "a worker goes on using a slot that was evicted",
        Rust("horovod-sim", ("a_hit_on_its_way_while_its_slot_is_evicted_still_counts",)),
    ),
    Fault(
        "wrong-process-set-id",
        "crates/horovod-protocol/src/process_sets.rs",
        "ProcessSetId(self.next_id - 1)",
        "ProcessSetId(self.next_id / 2)",
        "two process sets have one id",
        Rust("horovod-protocol", ("ids_count_up_and_freed_ones_return_in_order",)),
    ),
    Fault(
        "dropped-message",
        "crates/horovod-protocol/src/coordinator/dispatch.rs",
        "            self.full.push(std::mem::take(&mut self.open));\n",
        "            self.open.clear();\n",
        "responses that do not fit one message are never sent",
        Rust("horovod-sim", ("decisions_that_do_not_fit_one_message_all_arrive",)),
    ),
    # ---- transport
    Fault(
        "lost-wake-up",
        "crates/horovod-transport/src/shm/notifier.rs",
        "sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::Acquire) != 0",
        "sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::Acquire) == 0",
        "a rank that sleeps is not woken by what its peers write",
        Rust("horovod-transport", ("a_sleeping_rank_is_woken_by_a_flag",)),
    ),
    Fault(
        "heartbeat-never-sent",
        "crates/horovod-transport/src/heartbeat.rs",
        "        check.send = !self.doubts;\n",
        "        check.send = false;\n",
        "ranks give no sign of life",
        Rust("horovod-transport", ("all_are_told_four_times_in_a_time_out",)),
    ),
    Fault(
        "strangers-accepted",
        "crates/horovod-transport/src/handshake.rs",
        ".psk(0, key.bytes())?",
        ".psk(0, &[0; 32])?",
        "a peer without the job's key is accepted",
        Rust("horovod-transport", ("another_key_is_refused_and_both_sides_know",)),
    ),
    Fault(
        "length-bound-removed",
        "crates/horovod-transport/src/framing.rs",
        "        if len > self.max {\n",
        "        if len > OUT_OF_BAND as usize {\n",
        "a peer's length is not checked before memory is taken for it",
        Rust("horovod-transport", ("a_length_over_the_limit_is_refused_before_its_bytes_come",)),
    ),
    # ---- engine
    Fault(
        "wrong-divisor-after-a-join",
        "crates/horovod-engine/src/engine/backend/host.rs",
        "JoinAverage::Contributors => self.execution.contributors,",
        "JoinAverage::Contributors => self.execution.contributors + 1,",
        "averages divide by one rank too many",
        Rust("horovod-engine", ("joined_ranks_contribute_the_identity_and_the_mean",)),
    ),
    Fault(
        "wrong-root",
        "crates/horovod-engine/src/engine/backend/host/operations.rs",
        "collectives::broadcast(ctx, root, &segment_scratch.bytes)",
        "collectives::broadcast(ctx, ctx.members.len() - 1 - root, &segment_scratch.bytes)",
        "another member's tensor is broadcast",
        Rust("horovod-engine", ("every_element_meets_its_like",)),
    ),
    Fault(
        "missing-abort",
        "crates/horovod-engine/src/engine/driver/ending.rs",
        "        self.on_device.abort(&Aborted(error.to_string().into()));\n",
        "",
        "what runs on a GPU goes on when a rank is lost",
        Rust("horovod-engine", ("a_rank_that_leaves_amid_a_collective_frees_the_others",)),
    ),
    Fault(
        "notifier-not-armed",
        "crates/horovod-engine/src/engine/driver.rs",
        "            loop {\n                self.pump.links.waiter().arm();\n",
        "            loop {\n",
        "a caller that leaves the driver lock lets the engine's thread sleep on",
        Rust("horovod-engine", ("a_wait_that_is_over_leaves_the_call_to_the_callback_thread",)),
    ),
    Fault(
        "tuned-by-another-set",
        "crates/horovod-autotune/src/lib.rs",
        "if self.announced || self.finished || execution.set != ProcessSetId::GLOBAL {",
        "if self.announced || self.finished {",
        "operations of some ranks count as steps of the job",
        Rust("horovod-autotune", ("other_process_sets_and_barriers_do_not_count",)),
    ),
    Fault(
        "timeline-ends-too-early",
        "crates/horovod-timeline/src/layout.rs",
        "                .max(report.end)\n                .max(floor);\n",
        "                .max(floor);\n",
        "the last event of a tensor ends with its last stage",
        Rust("horovod-timeline", ("a_tensors_track_shows_its_life_as_horovod_writes_it",)),
    ),
    Fault(
        "late-only-now",
        "crates/horovod-diagnosis/src/verdict.rs",
        "    late.retain(|request| before.contains(&key(request)));\n",
        "",
        "what came up between the two looks counts as a stall",
        Rust("horovod-diagnosis", ("what_came_up_between_the_looks_is_no_stall_yet",)),
    ),
    # ---- GPUs
    Fault(
        "wrong-nccl-op",
        "crates/horovod-gpu/src/executor/plan.rs",
        "(None, NcclOp::Sum | NcclOp::Max) if dtype == DType::Bool => (NcclType::U8, NcclOp::Max),",
        "(None, NcclOp::Sum | NcclOp::Max) if dtype == DType::Bool => (NcclType::U8, NcclOp::Sum),",
        "sums of booleans overflow",
        Rust("horovod-engine", ("results_by_nccl_are_those_of_the_host",)),
    ),
    Fault(
        "wrong-device",
        "crates/horovod-gpu/src/device.rs",
        "let device = Box::leak(Box::new(Device::open(self, ordinal)?));",
        "let device = Box::leak(Box::new(Device::open(self, ordinal / 2 * 2)?));",
        "GPU 0 is used in place of GPU 1",
        Rust("horovod-gpu", ("the_device_of_a_stream_is_found_whatever_number_is_told",)),
    ),
    # ---- launcher
    Fault(
        "uncertain-clocks",
        "crates/horovod-doctor/src/findings/hosts.rs",
        "if ahead.saturating_sub(skew.uncertain_ns) <= SKEW_NS {",
        "if ahead <= SKEW_NS {",
        "a clock is said to be wrong that may be right",
        Rust("horovod-doctor", ("clocks_are_compared_beyond_what_is_uncertain",)),
    ),
    Fault(
        "alone-with-mpi-is-a-job",
        "crates/horovod-scheduler/src/reader.rs",
        'rank.trim() == "0" && processes',
        'rank.trim() == "1" && processes',
        "one process that has initialised Open MPI waits for others",
        Rust("horovod-scheduler", ("a_process_alone_that_has_initialised_open_mpi_is_alone",)),
    ),
    Fault(
        "answers-out-of-step",
        "crates/horovod-pmi/src/pmi1.rs",
        "std::mem::replace(&mut self.is_broken, true)",
        "std::mem::replace(&mut self.is_broken, false)",
        "after a request without an answer the next request goes on",
        Rust("horovod-pmi", ("after_a_request_without_answer_the_store_is_of_no_use",)),
    ),
    Fault(
        "a-wait-that-communicates-waits",
        "crates/horovod-metrics/src/clock.rs",
        "is_at(Activity::Waiting) | (is_at(Activity::Executing) << 1)",
        "is_at(Activity::Waiting) | ((is_at(Activity::Executing) & 0) << 1)",
        "the time of communication counts as time in which a rank waits for others",
        Rust("horovod-metrics", ("a_wait_is_split_into_waiting_for_ranks_and_communicating",)),
    ),
    Fault(
        "a-waiting-rank-is-blamed",
        "crates/horovod-metrics/src/slow/judge.rs",
        "awaited()?.min(lost - waiting)",
        "awaited()?",
        "a rank that itself waits as much as the others is named as slow",
        Rust("horovod-metrics", ("balanced_jobs_name_no_rank",)),
    ),
    Fault(
        "wrong-host-order",
        "crates/horovod-launch/src/hosts.rs",
        "            let rank = next + local_rank;\n",
        "            let rank = next + here - 1 - local_rank;\n",
        "ranks of a host are in the opposite order of local ranks",
        Rust("horovod-launch", ("assigns_ranks_as_horovod_does",)),
    ),
    Fault(
        "exit-code-swallowed",
        "crates/horovod-launch/src/job/ends.rs",
        "(None, Some(culprit)) => (culprit.cause.code(), JobOutcome::Failure, paragraphs),",
        "(None, Some(_)) => (0, JobOutcome::Failure, paragraphs),",
        "horovodrun ends with 0 although a rank has failed",
        Rust("horovod-launch", ("gives_the_failing_ranks_code_and_names_it_first",)),
    ),
    Fault(
        "last-line-lost",
        "crates/horovod-launch/src/job/ends.rs",
        "        self.output.finish(rank);\n",
        "",
        "a rank's last line is not shown if it has no end",
        Rust("horovod-launch", ("passes_on_bytes_that_are_no_text",)),
    ),
    # ---- the Rust front end
    Fault(
        "root-not-of-the-set",
        "crates/horovod/src/communicator.rs",
        "        let root = Rank(u32::try_from(*member).unwrap_or(u32::MAX));\n",
        "        let root = Rank(u32::try_from(root.max(*member * 0)).unwrap_or(u32::MAX));\n",
        "a broadcast in a process set comes from the rank of the job with the number of the member",
        Rust("horovod", ("a_process_set_has_operations_and_ranks_of_its_own",)),
    ),
    Fault(
        "oldest-state-wins",
        "crates/horovod/src/elastic.rs",
        "            commits,\n            standing,\n",
        "            u64::MAX - commits,\n            standing,\n",
        "after a loss, ranks of Rust go on from the oldest commit",
        Rust("horovod", ("the_newest_state_that_was_trained_wins_then_the_lowest_rank",)),
    ),
    # ---- candle and burn, which are tested in the second tier
    Fault(
        "unused-counts-as-one",
        "crates/horovod-candle/src/gradients.rs",
        "                    let zeros = var.zeros_like()?;\n",
        "                    let zeros = var.ones_like()?;\n",
        "a parameter that the loss of a rank does not use has a gradient of ones",
        Rust("horovod-candle", ("unused_parameters_count_as_zero_and_pair_by_name",)),
    ),
    Fault(
        "mistake-stays-on-its-rank",
        "crates/horovod-candle/src/parameters.rs",
        "    let mistake = own.as_ref().err().map(Error::to_string);\n",
        "    let own = Ok(own?);\n    let mistake = own.as_ref().err().map(Error::to_string);\n",
        "a rank whose gradient does not fit leaves the others waiting in the reduction",
        Rust("horovod-candle", ("a_gradient_that_does_not_fit_is_an_error_on_all_ranks",)),
    ),
    Fault(
        "own-ids-stay",
        "crates/horovod-burn/src/parameters.rs",
        "            param.id = id;\n",
        "            let _ = id;\n",
        "a broadcast of burn's parameters leaves each rank its own ids, by which the optimizer finds its moments",
        Rust("horovod-burn", ("an_elastic_state_is_restored_with_moments_and_ids",)),
    ),
    # ---- glue
    Fault(
        "wrong-dtype-size",
        "crates/horovod-tensorflow/src/dtypes.rs",
        "    dtype(2, 8, 8),\n",
        "    dtype(2, 8, 4),\n",
        "half of every float64 tensor of TensorFlow is copied",
        Rust("horovod-tensorflow", ("sizes_are_those_of_tensorflows_types",)),
    ),
    Fault(
        "root-ignored-by-the-fast-path",
        "crates/horovod-python/src/plain.rs",
        "        let op = op_from((BROADCAST, 0, 1.0, 1.0, root))?;\n        self.begin(\n",
        "        let op = op_from((BROADCAST, 0, 1.0, 1.0, root * 0))?;\n        self.begin(\n",
        "torch.broadcast_ sends rank 0's tensor whatever the root",
        Ranks((f"{TORCH}/test_memory_orders.py::test_one_order_on_all_ranks",)),
    ),
)
