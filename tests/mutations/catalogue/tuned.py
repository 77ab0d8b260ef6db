"""Bugs in tuned configs, the files they are kept in, and the settings that say where."""

from mutations.mutation import Layer

TUNED, FILES, SETTINGS = LAYERS = Layer("tuned configs"), Layer("files"), Layer("settings")
NEAREST = "test_tuned.py::test_the_nearest_larger_bucket_is_taken"
FULL_DISK = "test_tuned.py::test_a_full_disk_is_said_and_the_old_file_stays_whole"
WRITTEN = "test_tuned.py::test_what_is_written_is_used_at_once_and_others_are_kept"

TUNED.add("bucket-rounded-down", "all(e.scaled.get(k, -1) >= v for", "all(e.scaled.get(k, 0) <= v for", NEAREST)
TUNED.add(
    "largest-bucket-taken",
    "least = min(map(distance, fits), default=0.0)",
    "least = max(map(distance, fits), default=0.0)",
    NEAREST,
)
TUNED.add(
    "staleness-unsaid",
    'if changed else "tuned"',
    'if not entry else "tuned"',
    "test_tuned.py::test_stale_entries_are_used_and_said",
)
TUNED.add(
    "entries-of-another-device",
    'return [user_folder(op) / f"{slug}.json", ',
    'return [next(iter(sorted(user_folder(op).glob("*.json"))), user_folder(op) / f"{slug}.json"), ',
    "test_tuned_choice.py::test_what_was_tuned_for_another_device_is_not_used",
)
TUNED.add(
    "shipped-over-the-users",
    'return [user_folder(op) / f"{slug}.json", op.folder / "tuned" / slug / f"{op.name}.json"]',
    'return [op.folder / "tuned" / slug / f"{op.name}.json", user_folder(op) / f"{slug}.json"]',
    "test_tuned_choice.py::test_the_users_entry_goes_before_the_shipped_one",
)
TUNED.add(
    "time-before-rank",
    "key=lambda e: (e.rank, e.ms, e.kernel)",
    "key=lambda e: (e.ms, e.kernel)",
    "test_tuned.py::test_rank_goes_before_time",
    inside="nearest",
)
TUNED.add(
    "refused-entry-used",
    "        if why is None:\n            return",
    "        if True:\n            return",
    "test_tuned.py::test_an_entry_beyond_the_kernels_limits_is_refused_by_name_and_the_next_is_taken",
    inside="_best_tuned",
)
TUNED.add(
    "device-of-a-shipped-file-not-looked-at",
    "slug = path.parent.name if path.is_relative_to(op.folder) else path.stem",
    "slug = path.stem",
    "test_tuned_choice.py::test_a_shipped_file_is_read_and_its_configs_are_those_of_its_kernels",
)
TUNED.add(
    "older-names-unknown",
    "found = {names.get(name, name): value for name, value in fields.items()}",
    "found = dict(fields)",
    "test_tuned.py::test_fields_and_values_of_an_older_tilery_are_read_under_their_names_of_now",
)
TUNED.add(
    "older-values-unknown",
    "values[n].get(v, v) if n in values and isinstance(v, str) else v",
    "v",
    "test_tuned.py::test_fields_and_values_of_an_older_tilery_are_read_under_their_names_of_now",
)
TUNED.add("old-file-remembered", "    _read.cache_clear()\n", "", WRITTEN)

FILES.add("written-in-place", "        os.replace(partial, path)\n", "        path.write_bytes(data)\n", FULL_DISK)
FILES.add("not-synced", "            os.fsync(file.fileno())\n        os.replace", "        os.replace", FULL_DISK)
FILES.add(
    "lock-not-taken",
    'with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=_WAIT_S):',
    "with contextlib.nullcontext():",
    "test_tuned.py::test_a_lock_that_is_not_given_back_is_said",
)
FILES.add(
    "corrupt-file-overwritten",
    "kept = [e for e in read(path, op, path.stem) if same(e) not in replaced]",
    "kept = []\n        with contextlib.suppress(BadTunedFile):\n"
    "            kept = [e for e in read(path, op, path.stem) if same(e) not in replaced]",
    "test_tuned.py::test_a_corrupt_file_is_not_written_over",
)
FILES.add(
    "rest-dropped", "kept = [e for e in read(path, op, path.stem) if same(e) not in replaced]", "kept = []", WRITTEN
)
FILES.add(
    "unreadable-entry-written",
    "new = [_entry(json.loads(json.dumps(_plain(e))), path, 0) for e in entries]",
    "new = list(entries)",
    "test_tuned.py::test_an_entry_that_could_not_be_read_is_not_written",
)

SETTINGS.add(
    "bad-switch-accepted",
    "if value not in _SWITCH:\n"
    '        raise BadSetting(f"{variable} must be 0 or 1, got {value!r}")\n'
    "    return _SWITCH[value]",
    "return _SWITCH.get(value, True)",
    "test_settings.py::test_a_bad_value_raises",
)
SETTINGS.add(
    "override-stays",
    "        change(**{name: getattr(before, name) for name in changes})",
    "        pass",
    "test_settings.py::test_override_ends_with_its_block",
)
TUNED.add(
    "partial-file-written",
    "chosen = [(written, text) for written, text in texts if partial or not written.missing]",
    "chosen = texts",
    "test_sglang.py::test_only_whole_files_are_written_and_what_is_missing_is_said",
)
TUNED.add(
    "split-k-tuned-for-sglang",
    "            if why is None and problem.use:\n",
    "            if why is None and not problem.use:\n",
    "test_sglang.py::test_split_k_in_triton_is_no_candidate_and_what_won_is_kept_for_sglang",
)
TUNED.add(
    "sglangs-configs-in-dispatch",
    "return sglang.folder() if self.problem.use else None",
    "return None",
    "test_sglang.py::test_split_k_in_triton_is_no_candidate_and_what_won_is_kept_for_sglang",
)
TUNED.add(
    "sglangs-files-not-tried-for-it",
    "sglang.without_layout if self.problem.use else str",
    "str",
    "test_sglang.py::test_sglangs_own_files_are_tried_when_it_is_tuned_for",
)
TUNED.add(
    "vllms-name-has-a-space",
    'Program("vLLM", ("triton",), "")',
    'Program("vLLM", ("triton",), "  ")',
    "test_sglang.py::test_vllms_files_are_tritons_under_its_name",
)
