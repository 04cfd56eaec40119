"""From a YAML file and ``key=value`` overrides to one validated configuration.

The file may use Hydra's ``defaults`` list; the groups that ship with the package (``configs/``) are
on the search path. Every mistake becomes a :class:`ConfigError` that names the key, the value and
the remedy. Nothing here imports torch or RLinf.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from rlinf_wamrl.config.checkpoints import PATH_KEYS, shipped_checkpoints
from rlinf_wamrl.config.checks import check_lengths, check_values
from rlinf_wamrl.config.derive import derive_from_tasks
from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.config.micro_batch import choose_micro_batch
from rlinf_wamrl.config.schema import RunConfig

__all__ = ["SHIPPED_CONFIGS", "compose_run", "compose_typed", "shipped_config"]

SHIPPED_CONFIGS = "pkg://rlinf_wamrl.configs"
"""Hydra search path of the configuration groups in this package."""

_CONFIGS = Path(__file__).parent.parent / "configs"


def shipped_config(name: str) -> Path:
    """Return the file of a configuration in this package, for example ``pretrain/small``."""
    return _CONFIGS / f"{name}.yaml"


def compose_run(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose and validate the run described by the YAML file ``path``.

    Raises:
        ConfigError: see :func:`compose_typed`; or a value is impossible.
    """
    run = compose_typed(path, overrides, RunConfig)
    if not run.cluster.component_placement:  # as a default, it would be merged with what is given
        reward = ",reward" if run.RL.reconstruction.placement == "worker" else ""
        run.cluster.component_placement = {f"env,rollout,actor{reward}": 0}
    choose_micro_batch(run)
    check_values(run)
    derive_from_tasks(run)
    check_lengths(run)
    _make_paths_absolute(run)
    return run


def compose_typed(path: str | Path, overrides: Sequence[str], schema: type) -> DictConfig:
    """Compose a YAML file and fit it to a schema of dataclasses.

    Args:
        path: the configuration file.
        overrides: Hydra overrides such as ``runner.max_steps=3``.
        schema: dataclass of the whole configuration.

    Returns:
        The complete configuration: schema defaults filled in, interpolations resolved.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown, missing or of a wrong type.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ConfigError(f"configuration file {path} does not exist")
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(f"override {override!r} is not of the form key=value")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(path.parent), version_base="1.3"):
            composed = compose(
                config_name=path.name,
                overrides=[f"hydra.searchpath=[{SHIPPED_CONFIGS}]", *_adding(overrides)],
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{path.name}: {_first_lines(error)}") from error
    except Exception as error:  # the YAML parser's own family of errors
        if type(error).__module__.startswith("yaml"):
            raise ConfigError(f"{path.name} is not valid YAML: {error}") from error
        raise
    finally:
        GlobalHydra.instance().clear()
    return _fit_schema(composed, schema)


def _make_paths_absolute(run: DictConfig) -> None:
    """Workers may start in another folder than the command."""
    for model in (run.actor.model, run.rollout.model):
        for key in PATH_KEYS:
            value = model.get(key)
            if value is not None and value not in shipped_checkpoints():
                model[key] = str(Path(value).resolve())


def _fit_schema(composed: DictConfig, schema_type: type) -> DictConfig:
    schema = OmegaConf.structured(schema_type)
    _check_keys(composed, schema, "")
    try:
        merged = OmegaConf.merge(schema, composed)
        OmegaConf.to_container(merged, throw_on_missing=True)  # before what refers to such a value
        values = OmegaConf.to_container(merged, resolve=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} must be set") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_lines(error)}") from error
    return OmegaConf.create(values)


def _check_keys(node: DictConfig, schema: DictConfig, prefix: str) -> None:
    for key in node:
        name = f"{prefix}{key}"
        known = [str(option) for option in schema.keys()]  # noqa: SIM118 - also values not set yet
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown key {name!r}; {hint}")
        child, expected = node._get_node(key), schema._get_node(key)
        is_section = is_dataclass(OmegaConf.get_type(expected))  # a plain mapping takes any key
        if is_section and isinstance(child, DictConfig):
            _check_keys(child, expected, f"{name}.")


def _adding(overrides: Sequence[str]) -> list[str]:
    """Let overrides add keys a file leaves out; the schema judges the result.

    ``model=small`` chooses from a group, as everywhere in Hydra.
    """
    groups = [entry.name for entry in _CONFIGS.iterdir() if entry.is_dir()]
    plain = re.compile(rf"(?!({'|'.join(groups)})=)[\w.]+=")
    return [f"++{override}" if plain.match(override) else override for override in overrides]


def _first_lines(error: Exception) -> str:
    text, _, _ = str(error).partition("Config search path")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = lines if "Available options" in text else lines[:3]
    return " ".join(line for line in shown if not line.startswith("full_key"))
