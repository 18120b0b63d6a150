"""Checkpoint scenarios, run under the official SDK that is first on the path.

Run as `python -m tests.conformance.checkpoint_scenarios BASE_URL BASE_MODEL SCENARIO…` from the
root. Prints one JSON object, scenario → facts; the tests check the facts. `resumed` resumes from
the path in CHECKPOINT.
"""

from __future__ import annotations

from typing import Any

from tinker import types

from tests.conformance.checkpointing import (
    PROJECT,
    from_all_of_state,
    from_state,
    in_project,
    listed,
    paths_of,
    rest_of,
    run_of,
    saved,
    seen,
    steps,
)
from tests.conformance.export_scenarios import archived, exported
from tests.conformance.sampling_scenarios import made, sample, sampler_of, told
from tests.conformance.scenarios import IS_OLD, Bench, Facts, batch, error_of, run_named

TTL_S = 7200


# ---- Scenarios -----------------------------------------------------------------------------------


def restored(bench: Bench) -> Facts:
    """Save, train on, restore in every possible way, and continue next to a run that never
    restored."""
    straight = steps(bench.run())
    halfway = seen(straight)
    end = seen(steps(straight))

    run = steps(bench.run())
    path = saved(run, "halfway")
    steps(run, 1)
    astray = seen(run)
    run.load_state_with_optimizer(path).result()
    facts: Facts = {"halfway": halfway, "end": end, "astray": astray, "loaded": seen(run)}
    facts["loaded_end"] = seen(steps(run))
    run.load_state(path).result()
    facts["loaded_fresh"] = seen(run)
    facts["loaded_fresh_end"] = seen(steps(run))

    created = from_all_of_state(bench, path)
    facts["created"] = seen(created)
    facts["created_end"] = seen(steps(created))
    fresh = from_state(bench, path)
    facts["created_fresh"] = seen(fresh)
    facts["created_fresh_end"] = seen(steps(fresh))
    facts["runs"] = [run.model_id, created.model_id, fresh.model_id]
    facts["rank"] = fresh.get_info().lora_rank
    return facts


def discarded(bench: Bench) -> Facts:
    """Load over a gradient that no step has used.

    The load discards it, because it belongs to the old weights.
    """
    run = steps(bench.run())
    path = saved(run, "clean")
    clean = run.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics
    run.load_state_with_optimizer(path).result()
    run.forward_backward(batch(), "cross_entropy").result()
    run.load_state_with_optimizer(path).result()
    loaded = run.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics
    return {"clean": clean["grad_norm"], "loaded": loaded["grad_norm"]}


def named(bench: Bench) -> Facts:
    """Save twice under one name, first without and then with permission to overwrite."""
    run, rest = steps(bench.run()), rest_of(bench)
    path = saved(run, "name", **_metadata({"kept": "no", "a": "1"}))
    facts: Facts = {"path": path, "run": run.model_id, "before": seen(run)}
    facts["first"] = listed(rest, run)
    steps(run, 1)
    facts["collision"] = error_of(lambda: saved(run, "name"))
    facts["unmoved"] = seen(from_state(bench, path))
    facts["moved_path"] = saved(run, "name", overwrite=True, **_metadata({"b": "2"}))
    facts["after"] = seen(run)
    facts["moved"] = seen(from_state(bench, path))
    facts["listed"] = listed(rest, run)
    facts["wrong"] = {name: error_of(lambda name=name: saved(run, name)) for name in ("a/b", "..", "", "x" * 200)}
    facts["next"] = saved(run, "next")
    return facts


def _metadata(user_metadata: dict[str, str]) -> dict[str, Any]:
    return {} if IS_OLD else {"user_metadata": user_metadata}


def kept(bench: Bench) -> Facts:
    """Keep checkpoints for a while, longer, permanently, and for less than the minimum."""
    run, rest = steps(bench.run(), 1), rest_of(bench)
    path = saved(run, "for-a-while", ttl_seconds=TTL_S)
    run.save_weights_for_sampler("for-a-while", ttl_seconds=TTL_S).result()
    facts: Facts = {"too_short": error_of(lambda: saved(run, "too-short", ttl_seconds=60)), "saved": listed(rest, run)}
    rest.set_checkpoint_ttl_from_tinker_path(path, 2 * TTL_S).result()
    facts["longer"] = listed(rest, run)["weights/for-a-while"]["lives_s"]
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    facts["for_ever"] = listed(rest, run)["weights/for-a-while"]["lives_s"]
    facts["set_too_short"] = error_of(lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 60).result())
    return facts


def deleted(bench: Bench) -> Facts:
    """List and describe the checkpoints, delete some of them, and list again."""
    run = made(
        bench.service.create_lora_training_client(
            bench.base_model, rank=3, seed=7, train_mlp=False, user_metadata={"renderer": "plain"}
        )
    )
    rest = rest_of(bench)
    steps(run, 1)
    path = saved(run, "one")
    sampler = run.save_weights_for_sampler("two").result().path
    facts: Facts = {"run": run.model_id, "before": listed(rest, run)}
    of_tenant = rest.list_user_checkpoints(limit=50).result()
    facts["of_tenant"] = [each.tinker_path for each in of_tenant.checkpoints]
    about = rest.get_training_run(run.model_id).result()
    facts["about"] = {
        "id": about.training_run_id,
        "base_model": about.base_model,
        "rank": about.lora_rank,
        "corrupted": about.corrupted,
        "user_metadata": about.user_metadata,
        "last": about.last_checkpoint and about.last_checkpoint.checkpoint_id,
        "last_sampler": about.last_sampler_checkpoint and about.last_sampler_checkpoint.checkpoint_id,
    }
    weights = rest.get_weights_info_by_tinker_path(path).result()
    facts["weights"] = {
        name: getattr(weights, name) for name in ("base_model", "is_lora", "lora_rank", "train_attn", "train_mlp")
    }
    rest.delete_checkpoint_from_tinker_path(path).result()
    facts["after"] = listed(rest, run)
    facts["load"] = error_of(lambda: run.load_state(path).result())
    facts["create"] = error_of(lambda: from_state(bench, path))
    facts["delete"] = error_of(lambda: rest.delete_checkpoint_from_tinker_path(path).result())
    rest.delete_checkpoint(run.model_id, "sampler_weights/two").result()
    facts["none"] = listed(rest, run)
    facts["sample"] = error_of(lambda: made(bench.service.create_sampling_client(model_path=sampler)))
    facts["saved_again"] = saved(run, "one")
    return facts


def published(bench: Bench) -> Facts:
    """Publish a checkpoint to another tenant and unpublish it."""
    stranger = bench.of_key(1)
    run, rest, foreign = steps(bench.run()), rest_of(bench), rest_of(stranger)
    path = saved(run, "shared")
    saved(run, "kept")
    own = stranger.run()

    def tried() -> Facts:
        return {
            "create": error_of(lambda: from_state(stranger, path)),
            "load": error_of(lambda: own.load_state(path).result()),
            "weights_info": error_of(lambda: foreign.get_weights_info_by_tinker_path(path).result()),
            "sample": error_of(lambda: made(stranger.service.create_sampling_client(model_path=path))),
        }

    def taken() -> Facts:
        return {
            "delete": error_of(lambda: foreign.delete_checkpoint_from_tinker_path(path).result()),
            "publish": error_of(lambda: foreign.publish_checkpoint_from_tinker_path(path).result()),
            "ttl": error_of(lambda: foreign.set_checkpoint_ttl_from_tinker_path(path, None).result()),
        }

    facts: Facts = {"private": tried(), "private_writes": taken()}
    facts["private_list"] = error_of(lambda: listed(foreign, run))
    rest.publish_checkpoint_from_tinker_path(path).result()
    facts["is_public"] = listed(rest, run)["weights/shared"]["public"]
    facts["mine"] = seen(run)
    own.load_state(path).result()
    facts["theirs"] = [seen(from_state(stranger, path)), seen(own)]
    facts["public"] = tried()
    facts["public_list"] = sorted(listed(foreign, run))
    facts["public_writes"] = taken()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    facts["again_private"] = tried()
    facts["again_private_list"] = error_of(lambda: listed(foreign, run))
    facts["is_private"] = listed(rest, run)["weights/shared"]["public"]
    return facts


def sampled(bench: Bench) -> Facts:
    """Sample from the same weights through every API."""
    run = steps(bench.run())
    path = saved(run, "both")
    named_path = run.save_weights_for_sampler("both").result().path
    create = bench.service.create_sampling_client
    return {
        "now": told(sample(sampler_of(run), 2)),
        "training": told(sample(made(create(model_path=path)), 2)),
        "sampler": told(sample(made(create(model_path=named_path)), 2)),
        "base": told(sample(made(create(base_model=bench.base_model)), 2)),
    }


def copied(bench: Bench) -> Facts:
    """Copy a checkpoint, delete the original, and load the copy."""
    run, rest = steps(bench.run()), rest_of(bench)
    path = saved(run, "original")
    copies = [in_project(bench).copy_weights(path).result(), rest.copy_weights(path, PROJECT).result()]
    rest.delete_checkpoint_from_tinker_path(path).result()
    stranger = rest_of(bench.of_key(1))
    return {
        "path": path,
        "copies": copies,
        "original": seen(run),
        "loaded": [seen(from_all_of_state(bench, copy)) for copy in copies],
        "listed": paths_of(rest, run_of(copies[0])),
        "foreign": error_of(lambda: stranger.copy_weights(copies[0], PROJECT).result()),
    }


def undisturbed(bench: Bench) -> Facts:
    """Run each checkpoint operation once, as the reference for runs with faults."""
    run, rest = steps(bench.run()), rest_of(bench)
    count_before = _count(rest)
    path = saved(run, "saved")
    run.load_state(path).result()
    created = from_all_of_state(bench, path)
    rest.publish_checkpoint_from_tinker_path(path).result()
    paths = [path, run.save_weights_for_sampler("sampled").result().path]
    if not IS_OLD:
        paths.append(run.save_weights_external("exported").result().path)
        copy = rest.copy_weights(path, PROJECT).result()
        paths += paths_of(rest, run_of(copy))
    return {
        "seen": [seen(run), seen(created), seen(steps(created))],
        "listed": sorted(listed(rest, run)),
        "paths": len(set(paths)),
        "new": _count(rest) - count_before,
    }


def _count(rest: Any) -> int:
    return int(rest.list_user_checkpoints(limit=1).result().cursor.total_count)


if __name__ == "__main__":
    run_named({**globals(), "archived": archived, "exported": exported})
