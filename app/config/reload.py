"""SIGHUP: read the file, the environment and the secrets again, and apply what may change.

A mistake changes nothing.
"""

from __future__ import annotations

import logging

from convoy.app.calls.access import ApiKey, ServeOptions
from convoy.app.config.settings import OptionHeld, Settings
from convoy.app.core import Core
from convoy.app.server import logs
from convoy.models.errors import UsageError
from convoy.models.tls import ServerTls

_log = logging.getLogger("convoy")


class Reloading:
    """Applies changes to one core, HTTP and gRPC."""

    def __init__(self, settings: Settings, core: Core, options: ServeOptions) -> None:
        self._settings, self._core, self._options = settings, core, options

    def read_again(self) -> None:
        """Apply the current configuration. Raises nothing: a mistake is logged, and nothing changes."""
        before = self._settings
        try:
            after = before.read_again()
            to = after.serve_options()
            _check_tls(self._options.tls, to.tls)
        except UsageError as error:
            _log.error("cannot reload the settings, so nothing changed: %s; fix it and send SIGHUP again", error)
            return
        keys_before = self._options.api_keys
        if to.tls != self._options.tls:
            _log.info("new connections use the reloaded certificate")
        self._settings = _with_what_may_change(before, after)
        logs.set_level(after.log_level)
        self._options.change(to)
        # From the effective values, not from what was read: the global queue limit waits for a restart, a model's does
        # not.
        self._core.lifecycle.change_rules(self._settings.queue_rules())
        self._core.control.change_loads(after.load_by_model(self._core.load_options))
        _tell(_changed(before, after), to, keys_before)


def _check_tls(before: ServerTls | None, after: ServerTls | None) -> None:
    """Raise UsageError if TLS, or client certificates, would be switched on or off."""
    asks_before, asks_after = (tls and (tls.client_ca is not None) for tls in (before, after))
    if asks_before != asks_after:
        raise UsageError("restart the server to turn TLS or client certificates on or off")


def _with_what_may_change(before: Settings, after: Settings) -> Settings:
    """The old settings with the live options replaced, so that each reload reports what still waits for a restart."""
    live = {one.keys[0] for one in [*before.options(), *after.options()] if one.changes_on_sighup} | {"models"}
    return before.model_copy(update={name: getattr(after, name) for name in live})


def _changed(before: Settings, after: Settings) -> list[OptionHeld]:
    """The options whose values differ; one that is left out equals one without a value."""
    old, new = ({one.keys: one for one in each.options() if one.value is not None} for each in (before, after))
    return [one for keys, one in {**old, **new}.items() if old.get(keys) != new.get(keys)]


def _tell(changed: list[OptionHeld], to: ServeOptions, keys_before: tuple[ApiKey, ...]) -> None:
    """Log which changes have effect now, from a model's next load on, and after a restart."""
    # The keys are in a file whose path stays the same.
    new_keys = ["the API keys"] if to.api_keys != keys_before else []
    now = ", ".join([one.name for one in changed if one.changes_on_sighup] + new_keys)
    later = [one for one in changed if not one.changes_on_sighup]
    at_next_load = ", ".join(one.name for one in later if one.keys[0] == "models")
    at_restart = ", ".join(one.name for one in later if one.keys[0] != "models")
    keys = ", ".join(key.name for key in to.api_keys)
    _log.info("reloaded the settings; changed: %s; API keys: %s", now or "none", keys or "none")
    if keys_before and not to.api_keys:
        _log.warning("requests need no API key any more: every client that reaches the port can send them")
    if at_next_load:
        _log.warning(
            "%s: takes effect when the model is loaded again; unload and load it, or restart the server", at_next_load
        )
    if at_restart:
        _log.warning("%s: takes effect after a restart of the server", at_restart)
