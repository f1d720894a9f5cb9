"""`meshwright completion SHELL`: a script that completes verbs, options, keys of run files, models and cards.

The script is made from the parser and the schema, and holds every word: pressing Tab starts no Python.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from meshwright.config import presets
from meshwright.config.explain import Explanation, keys
from meshwright.hardware.cluster import catalogue

FILES, KEYS, NAMES, MODELS, CARDS = "@files", "@keys", "@names", "@models", "@cards"  # what stands for many words
A_FILE = re.compile(r"(FILE|FOLDER|DIR|RUN|IN|OUT)(\.\w+)?")  # as help calls what is a path
PATHS = ("data.source", "data.tokenizer", "init.from", "plan.optimizer_offload_folder")  # keys of a path


class VerbWords(msgspec.Struct, frozen=True, kw_only=True):
    """What may follow a verb, and what may follow each of its options; an option that takes nothing has None."""

    about: str
    options: dict[str, tuple[str, ...] | None]
    words: tuple[str, ...] = ()
    then: dict[str, tuple[str, ...]] = {}  # after the first of a few words, such as `config show`


def add_completion(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("shell", choices=tuple(SHELLS), help="the script goes to standard output: docs/install.md")


def completion(options: argparse.Namespace) -> int:
    """Print the script."""
    print("\n".join(SHELLS[options.shell]({verb: words_of(verb) for verb in _verbs()})))
    return 0


def _verbs() -> dict[str, str]:
    from meshwright.cli.main import VERBS

    return {name: verb.help for name, verb in VERBS.items()}


def words_of(verb: str) -> VerbWords:
    """The words of a verb, from its own parser."""
    from meshwright.cli.main import add_arguments

    parser = argparse.ArgumentParser(prog=verb)
    add_arguments(parser, verb)
    options: dict[str, tuple[str, ...] | None] = {}
    first: tuple[str, ...] = ()
    then: list[str] = []
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        for flag in action.option_strings:
            options[flag] = None if action.nargs == 0 else _values(action)
        if not action.option_strings and action.choices and not first:
            first = tuple(action.choices)
        elif not action.option_strings:
            then += _values(action)
    follow = {word: (NAMES,) if word == "explain" else tuple(then) for word in first if then}
    return VerbWords(about=_verbs()[verb], options=options, words=first or tuple(then), then=follow)


def _values(action: argparse.Action) -> tuple[str, ...]:
    """What an argument takes: its choices, or what its name says."""
    if action.choices:
        return tuple(map(str, action.choices))
    if action.dest == "words":
        return (KEYS, FILES, *([MODELS] if "MODEL" in str(action.metavar) else []))
    if action.dest == "cluster":
        return (CARDS, FILES)
    if action.dest == "network":
        return tuple(catalogue().networks)
    if action.dest == "what_if":
        return (KEYS,)
    # A word that is no option names a run, a folder or a file.
    is_path = not action.option_strings or action.type is Path or A_FILE.fullmatch(str(action.metavar))
    return (FILES,) if is_path else ()


def _choices(key: Explanation) -> tuple[str, ...]:
    """What may stand behind a key."""
    if key.key == "arch.preset":
        return (MODELS,)
    if key.key == "goal.cluster":
        return (CARDS,)
    if key.key in PATHS:
        return (FILES,)
    return tuple(map(str, key.choices)) or (("true", "false") if key.value == "true or false" else ())


def _settings() -> list[Explanation]:
    """The keys that a word can set: not those of an entry of a list."""
    return [key for key in keys().values() if not key.key.startswith("data.mix") and key.key != "extends"]


def _words(words: tuple[str, ...]) -> str:
    """Words as bash and zsh expand them: what stands for many is a variable; files and cards are left to the end."""
    return " ".join(f"$_meshwright_{word[1:]}" if word in (KEYS, NAMES, MODELS) else word for word in words)


def _lists() -> Iterator[tuple[str, list[str]]]:
    """What a key's beginning completes to (tables before their keys), every key, and the names of models and cards."""
    settings = [f"{key.key}=" for key in _settings()]
    yield "tables", list(dict.fromkeys(f"{key.partition('.')[0]}." if "." in key else key for key in settings))
    yield "settings", settings
    yield "names", list(keys())
    yield "models", list(presets.preset_names())
    yield "cards", list(catalogue().cards)


def _portable(verbs: dict[str, VerbWords]) -> Iterator[str]:
    """A function for bash and zsh: every word that may end a line, and failure where files may too."""
    yield from (f"_meshwright_{name}='{' '.join(words)}'" for name, words in _lists())
    pairs = [f"'{verb} {word}'" for verb, each in verbs.items() for word in each.then]
    yield f'{HEAD}\n  case "$verb $second" in {"|".join(pairs)}) state="$verb $second" ;; esac'
    yield '  case "$cur" in'
    yield from (
        f"    {key.key}=*) before={key.key}=; cur=${{cur#*=}}; set -- {_words(values)} ;;"
        for key in _settings()
        if (values := _choices(key))
    )
    yield '    *=*) return ;;\n    -*) case "$verb" in'
    yield from (f"      {verb}) set -- {' '.join(each.options)} ;;" for verb, each in verbs.items())
    yield '      *) set -- --help --version ;;\n      esac ;;\n    *) case "$verb $prev" in'
    for verb, each in verbs.items():
        taking = {flag: values for flag, values in each.options.items() if values is not None}
        yield from (f"      '{verb} {flag}') set -- {_words(values)} ;;" for flag, values in taking.items())
    yield f"      *) case \"$state\" in\n        '') set -- {' '.join(verbs)} ;;"
    for verb, each in verbs.items():
        states = {
            verb: each.words or tuple(each.options),
            **{f"{verb} {word}": then for word, then in each.then.items()},
        }
        yield from (f"        '{state}') set -- {_words(words)} ;;" for state, words in states.items())
    yield f"        *) set -- ;;\n      esac ;;\n    esac ;;\n  esac\n{TAIL}"


# What it sets stays in here: it is called in a subshell.
HEAD = """\
_meshwright_candidates() {
  [ -n "$ZSH_VERSION" ] && emulate -L sh
  set -f
  local IFS=$' \\t\\n' line="$1" cur= prev= verb= second= state= before= word= count= files=
  local _meshwright_keys="$_meshwright_tables"
  set -- $line
  case "$line" in *[[:space:]]) set -- "$@" '' ;; esac
  while shift; [ $# -gt 1 ]; do
    prev=$1
    case "$1" in -*) continue ;; esac
    if [ -z "$verb" ]; then verb=$1; elif [ -z "$second" ]; then second=$1; fi
  done
  cur=$1 state=$verb
  case "$cur" in *.*) _meshwright_keys="$_meshwright_settings" ;; esac"""
TAIL = """\
  for word in "$@"; do
    case "$word" in
      @files) files=1 ;;
      @cards)
        count=${cur%%x*}
        case "$count" in ''|*[!0-9]*) count=8 ;; esac
        for word in $_meshwright_cards; do printf '%s\\n' "$before${count}x$word"; done ;;
      *) printf '%s\\n' "$before$word" ;;
    esac
  done
  [ -z "$files" ]
}"""
BASH = """\
_meshwright() {
  local line="${COMP_LINE:0:$COMP_POINT}" found files='' cur value before IFS=$'\\n'
  cur=${line##*[[:space:]]} value=${cur#*=} before=${cur%"${cur#*=}"}
  found=$(_meshwright_candidates "$line") || files=1
  COMPREPLY=($(compgen -W "$found" -- "$cur"))
  # bash takes what stands behind an = for a word of its own
  case "$COMP_WORDBREAKS" in *=*) COMPREPLY=("${COMPREPLY[@]#"$before"}") before='' ;; esac
  if [ -n "$files" ]; then
    compopt -o filenames 2>/dev/null
    COMPREPLY+=($(compgen -P "$before" -f -- "$value"))
  fi
  case "${COMPREPLY[0]}" in *[=.]) compopt -o nospace 2>/dev/null ;; esac
}
complete -F _meshwright meshwright"""
ZSH = """\
_meshwright() {
  local found files=
  found=$(_meshwright_candidates "${(j: :)words[1,CURRENT]}") || files=1
  compadd -S '' -- ${(M)${(f)found}:#*[=.]}
  compadd -- ${${(f)found}:#*[=.]}
  if [[ -n $files ]]; then compset -P '*='; _files; fi
}
compdef _meshwright meshwright"""


def _bash(verbs: dict[str, VerbWords]) -> Iterator[str]:
    yield "# source <(meshwright completion bash)"
    yield from (*_portable(verbs), BASH)


def _zsh(verbs: dict[str, VerbWords]) -> Iterator[str]:
    yield "#compdef meshwright\n# source <(meshwright completion zsh)"
    yield from (*_portable(verbs), ZSH)


FISH = """\
function __meshwright_keys
    switch (commandline -ct)
        case '*=*'
            printf '%s\\n' $__meshwright_values
        case '*.*'
            printf '%s\\n' $__meshwright_settings
        case '*'
            printf '%s\\n' $__meshwright_tables
    end
end
function __meshwright_cluster
    set -l count (string match -r '^[0-9]+(?=x)' -- (commandline -ct)); or set count 8
    printf "$count"x%s\\n $__meshwright_cards
end
complete -c meshwright -f"""


def _fish(verbs: dict[str, VerbWords]) -> Iterator[str]:
    """Lines that say what may stand where; fish itself tells what fits."""
    yield "# meshwright completion fish | source"
    yield from (f"set -g __meshwright_{name} {' '.join(words)}" for name, words in _lists())
    known = dict(_lists())
    values = []
    for key in _settings():
        many = [known[word[1:]] if word == MODELS else [word] for word in _choices(key) if word not in (FILES, CARDS)]
        values += [f"{key.key}={value}" for each in many for value in each]
    yield f"set -g __meshwright_values {' '.join(values)}\n{FISH}"
    for verb, each in verbs.items():
        yield f"complete -c meshwright -n __fish_use_subcommand -a {verb} -d {_quoted(each.about)}"
        here = f"complete -c meshwright -n '__fish_seen_subcommand_from {verb}'"
        for flag, taken in each.options.items():
            if flag.startswith("--"):
                takes = "" if taken is None else f" -{'r' if FILES in taken else 'x'}{_fish_words(taken)}"
                yield f"{here} -l {flag[2:]}{takes}"
        if each.words and not each.then:
            yield f"{here}{_fish_words(each.words)}"
        for word, then in each.then.items():
            first = f"__fish_seen_subcommand_from {verb}; and not __fish_seen_subcommand_from {' '.join(each.then)}"
            yield f"complete -c meshwright -n '{first}' -a {word}"
            after = f"__fish_seen_subcommand_from {verb}; and __fish_seen_subcommand_from {word}"
            yield f"complete -c meshwright -n '{after}'{_fish_words(then)}"


def _fish_words(words: tuple[str, ...]) -> str:
    """What follows, as the arguments of `complete`."""
    many = {KEYS: "(__meshwright_keys)", CARDS: "(__meshwright_cluster)"}
    said = [many.get(word, f"$__meshwright_{word[1:]}" if word[0] == "@" else word) for word in words if word != FILES]
    return (" -F" if FILES in words else "") + (f' -a "{" ".join(said)}"' if said else "")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
