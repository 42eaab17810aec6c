"""The child process of `models.chat`: renders one template under limits and exits. Run as a script, never imported.

stdin: JSON {"template", "variables", "seconds", "memory_bytes", "output_chars"}; stdout: JSON {"text"} or {"error"}.
It imports nothing of the project, so that it starts in some 50 ms.
"""

import datetime
import json
import signal
import sys


def _limit(request):
    """Limits that the kernel keeps, whatever the template makes the interpreter do."""
    # No handler on purpose: the default action ends the process even inside one long C call.
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    import resource

    for name, value in (("RLIMIT_AS", request["memory_bytes"]), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        resource.setrlimit(getattr(resource, name), (value, value))


def _environment():
    import jinja2
    from jinja2 import sandbox

    def raise_exception(message):
        raise jinja2.TemplateError(str(message))

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Not jinja2's own filter, which escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return environment


def _render(request):
    environment = _environment()
    pieces, size = [], 0
    for piece in environment.from_string(request["template"]).generate(request["variables"]):
        size += len(piece)
        if size > request["output_chars"]:
            return {"error": f"its text grew past {request['output_chars']} characters"}
        pieces.append(piece)
    return {"text": "".join(pieces)}


def main():
    sys.path[:0] = sys.argv[1:]  # where jinja2 and markupsafe live; -S keeps site-packages out
    request = json.load(sys.stdin)
    try:
        if hasattr(signal, "setitimer"):  # not on Windows, where the parent's clock is the only limit
            _limit(request)
        answer = _render(request)
    except MemoryError:
        answer = {"error": "it needs more memory than it is given"}
    except RecursionError:
        answer = {"error": "it nests or recurses too deeply"}
    except Exception as error:  # a stranger's template can raise anything; the parent makes it a ChatTemplateError
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
