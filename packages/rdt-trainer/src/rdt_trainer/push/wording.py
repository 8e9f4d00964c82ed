"""What servers and trainers say, in the words of one who runs `rdt-push`."""

import logging
import re

__all__ = ["PlainFormatter", "plain"]

MAX_NAMED = 5  # names that one message lists

# vLLM's wrappers around what a worker said.
_WRAPPERS = re.compile(
    r"Call to \w+ method failed: |Worker failed with error '"
    r"|', please check the stack trace above for the root cause"
)
_REPLICA = re.compile(r"replica \d+ \((\S+)\)")
_LOGGED = re.compile(r"^(epoch \d+: replica \d+ (is dropped|goes without): |rank 0, )")

_LACKING = re.compile(
    r"\d+ parameters are not wholly written by the weights; load them, or exempt them if the "
    r"engine never does:(?P<found>(\n .*)*)"
)
_LACKED = re.compile(r"^    (?P<name>\S+) \(", re.M)
_REFUSED = re.compile(
    r"\w+ cannot load the \d+ weights that the trainer publishes: (?P<why>.*?) "
    r"\(while recording the loader of weight '(?P<name>[^']*)'\)",
    re.S,
)
_UNKNOWN = re.compile(r"no module or parameter named|^'[^']*'$")
_LISTED = re.compile(r"\. The available parameters belonging to .*?: \{[^}]*\}", re.S)
_UNREAD = re.compile(
    r"no worker of any replica reads \d+ of the \d+ names that the source serves: (?P<names>.*?); "
    r"expected each to be .*?RdtTrainer\(unconsumed=\['(?P<name>[^']*)', \.\.\.\]\)",
    re.S,
)


def plain(text: str) -> str:
    """Names first, options of the command and calls of the server as remedies, URLs as names."""
    text = _REPLICA.sub(r"\1", _LOGGED.sub("", _WRAPPERS.sub("", text)))
    text = _LACKING.sub(_lacking, _REFUSED.sub(_refused, _UNREAD.sub(_unread, text)))
    return text.replace(
        "end the first, or shut its weight transfer down",
        "end the first, or detach the server from it: POST /shutdown_weight_transfer_engine",
    )


class PlainFormatter(logging.Formatter):
    """Log records in these words."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def _lacking(found: re.Match[str]) -> str:
    names = _LACKED.findall(found["found"])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (
        f"the checkpoint lacks {', '.join(names[:MAX_NAMED])}{more}, or parts of it, by the names "
        "of the server's model"
    )


def _refused(found: re.Match[str]) -> str:
    name = found["name"]
    told = f"{name!r} of the checkpoint: {_LISTED.sub('', found['why'])}"
    return f"{told}; {_hint(name)}" if _UNKNOWN.search(found["why"]) else told


def _unread(found: re.Match[str]) -> str:
    return f"{found['names']} of the checkpoint: read by no worker; {_hint(found['name'])}"


def _hint(name: str) -> str:
    """The option that lets ``name`` be, and what lies beside it."""
    module, _, _ = name.rpartition(".")
    return f"if no worker needs it: --unconsumed '{f'{module}.*' if module else name}'"
