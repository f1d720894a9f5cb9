"""What `[eval]` has beside the validation loss: texts after prompts, and a user's command on the exported model.

Neither ends training. Texts are written by all ranks under the run's own plan. For a command the model is written once,
which training waits for; it becomes a Hugging Face folder, and the command runs on it, in another process.
"""

import gc
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tokenizers import Tokenizer

from meshwright.checkpoint.model_folder import save_native
from meshwright.config import evaluation
from meshwright.config.run import Run
from meshwright.config.weights import MODEL, TEXT, note_of
from meshwright.data import tokenize
from meshwright.data.chat import TemplateError, chat_template
from meshwright.data.prepare import Corpus
from meshwright.parallel.device import moment
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.errand import Errand
from meshwright.runtime.files import printable
from meshwright.runtime.records import CommandRecord
from meshwright.spec.problem import InputError, mistake
from meshwright.train import eval_command
from meshwright.train.eval_command import command_line, outcome
from meshwright.train.log import WIDTH, Recorder
from meshwright.train.loop import Stop
from meshwright.train.sample import continued
from meshwright.train.state import State, weights


class Evaluator:
    """One rank's part of it. The first rank starts commands, and keeps what becomes of them."""

    def __init__(self, run: Run, folder: Path, rank: int) -> None:
        self.run, self.folder, self.leads = run, folder, rank == 0
        self.prompts = evaluation.prompts(run)
        self.command_of = self.told_of = -1  # the step whose command runs, and the last of which others were told
        self.errand: Errand | None = None
        self.finished = False

    def begin(self, state: State, mesh: Mesh, corpus: Corpus, recorder: Recorder) -> None:
        """The ranks stand ready."""
        self.state, self.mesh, self.corpus, self.recorder = state, mesh, corpus, recorder
        self.tokens, self.ends = list[list[int]](), frozenset[int]()
        if self.prompts and corpus.tokenizer is None:
            what = "eval.prompts are texts, and ready tokens have no tokenizer"
            raise mistake(what, "set data.tokenizer, or leave eval.prompts out", "eval.prompts")
        if self.prompts and corpus.tokenizer is not None:
            self.words = tokenize.load(corpus.tokenizer)
            self.tokens = encoded(self.run, self.prompts, self.words)
            stops = {stop for chat in corpus.chats if chat is not None for stop in (*chat.stops, *chat.ends)}
            self.ends = frozenset(stops if corpus.end_token is None else stops | {corpus.end_token})

    def after(self, step: int) -> None:
        """What is due between this step and the next. All ranks must call it."""
        evals, calendar = self.run.eval, self.state.outer.calendar
        self._collect()
        if step == self.run.steps or self.state.stopped:
            return  # the end has its own
        if self.prompts and calendar.has_come(step, evals.prompts_every):
            self.write_texts(step)
        if evals.command and calendar.has_come(step, evals.command_every) and not self._is_busy(step):
            self.export(step)

    def finish(self, step: int) -> None:
        """What the trained model is evaluated by. Its folder is there by now."""
        if self.prompts:
            self.write_texts(step)
        self.finished = True

    def write_texts(self, step: int) -> None:
        """Continue all prompts together."""
        began = moment(self.mesh.device)
        tokens = continued(self.state.chunks, self.run, self.tokens, self.ends, self.mesh)
        shown = [[token for token in each if token not in self.ends] for each in tokens]
        texts = tuple(behind(self.words, *pair) for pair in zip(self.tokens, shown, strict=True))
        self.recorder.wrote(step, self.prompts, texts, began, moment(self.mesh.device))
        self.recorder.screen.say(text_line(step, self.prompts, texts))

    def export(self, step: int) -> None:
        """Write the model as it is now, and start the command on it."""
        began, place = moment(self.mesh.device), eval_command.place(self.folder, step)
        self.state.optimizer.settle()
        whole, failed = weights(self.state.chunks, self.run, self.mesh), ""
        if self.leads:
            try:
                place.mkdir(parents=True, exist_ok=True)
                note = note_of(msgspec.to_builtins(self.run), self.folder)
                texts = self.folder / TEXT
                save_native(place / MODEL, self.run.arch, whole, self.corpus.tokenizer, texts, note)
            except (OSError, SafetensorError, InputError) as error:
                failed = f"the model could not be written: {error}"
        deque(whole, maxlen=0)  # take part in gathering
        self.recorder.exported(step, began, moment(self.mesh.device))
        if failed:
            shutil.rmtree(place / MODEL, ignore_errors=True)
            self._keep(CommandRecord(step=step, state="failed", text=failed, folder=str(place)))
        elif self.leads:
            self._start(step, place / MODEL, remove=(place / MODEL,))

    def _is_busy(self, step: int) -> bool:
        """Whether the last command still runs: then this step has none. All ranks must agree."""
        busy = torch.tensor(float(self.errand is not None), device=self.mesh.device)
        if self.mesh.world > 1:
            dist.broadcast(busy, 0)
        is_busy = bool(busy.item())
        if is_busy and self.leads:
            text = f"that of step {self.command_of} still runs"
            self._keep(CommandRecord(step=step, state="skipped", text=text), aloud=self.told_of != self.command_of)
            self.told_of = self.command_of
        return is_busy

    def _start(self, step: int, model: Path, remove: tuple[Path, ...] = ()) -> None:
        try:
            self.errand, self.command_of = eval_command.started(self.run, self.folder, step, model, remove), step
        except OSError as error:
            place = eval_command.place(self.folder, step)
            self._keep(CommandRecord(step=step, state="failed", text=str(error), folder=str(place)))

    def _collect(self) -> None:
        """Keep what became of a command that has ended."""
        if self.errand is not None and (result := self.errand.poll()) is not None:
            self._keep(outcome(self.command_of, self.errand.folder, result))
            self.errand = None

    def _keep(self, record: CommandRecord, aloud: bool = True) -> None:
        record = msgspec.structs.replace(record, at=time.monotonic())
        self.recorder.commanded(record)
        if aloud:
            self.recorder.screen.say(command_line(record))

    @contextmanager
    def closing(self, stop: Stop) -> Iterator[None]:
        """A context at whose end no command runs: of a run that is done the last one is waited for, else it is ended.

        By then the ranks have parted and the device is free, for the command to use.
        """
        try:
            yield
        except BaseException:
            self._end()
            raise
        if not self.finished:
            self._end()
            return
        if self.leads and self.run.eval.command:
            del self.state, self.corpus
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self.await_last(stop)

    def await_last(self, stop: Stop) -> None:
        """Wait for the command on the model of the last step, and for the one before it."""
        if self.errand is not None:
            self._wait(stop)
        if not stop.asked:
            self.recorder.screen.say(f"running eval.command on the model of step {self.run.steps}")
            self._start(self.run.steps, self.folder / MODEL)
            self._wait(stop)
        stop.owes = stop.asked and eval_command.is_owed(self.run, self.folder)

    def _wait(self, stop: Stop) -> None:
        while self.errand is not None and not stop.asked:
            self._collect()
            time.sleep(eval_command.LOOK_SECONDS)
        self._end()

    def _end(self) -> None:
        if self.errand is not None:
            self._keep(outcome(self.command_of, self.errand.folder, self.errand.stop()))
            self.errand = None


def encoded(run: Run, prompts: tuple[str, ...], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of prompts; those of a chat are questions, in the template up to where an answer begins."""
    if not run.data.is_chat:
        found = [tokenizer.encode(prompt).ids for prompt in prompts]
    else:
        template = chat_template(run, tokenizer)
        try:
            asked = [template.text([{"role": "user", "content": prompt}], prompt=True) for prompt in prompts]
        except TemplateError as error:
            what = f"the chat template of {template.name} refuses a question of eval.prompts: {error}"
            raise mistake(what, "leave eval.prompts out, or use another template", "eval.prompts") from None
        found = [tokenizer.encode(text, add_special_tokens=False).ids for text in asked]
    if not all(found):
        raise mistake("a prompt of eval.prompts has no tokens", "give a text to continue", "eval.prompts")
    return found


def behind(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text of tokens behind a prompt; some tokenizers drop a space that begins a text, so not by themselves."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens)


def text_line(step: int, prompts: tuple[str, ...], texts: tuple[str, ...]) -> str:
    """A line for the first of the texts; the records have all of them."""
    (prompt, text), *others = zip(prompts, texts, strict=True)
    more = f" (and {len(others)} more)" if others else ""
    words = " ".join(printable(f"{prompt} → {text}").split())
    line = f"text after step {step}: {words}"
    room = WIDTH - len(more)
    return (line if len(line) <= room else f"{line[: room - 1]}…") + more
