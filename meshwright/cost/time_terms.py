"""Seconds by what they are spent on: a small vector that stages, passes and steps are added up in."""

import msgspec


class Terms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Seconds of one piece of work on one rank. Communication is what arithmetic does not hide."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    launch: float = 0.0  # the device waits for the host
    link: float = 0.0  # and for activations on their way to and from the host's memory

    @property
    def seconds(self) -> float:
        work = self.products + self.attention + self.elementwise + self.launch
        return work + self.tp + self.cp + self.ep + self.link

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(
            products=self.products + other.products,
            attention=self.attention + other.attention,
            elementwise=self.elementwise + other.elementwise,
            tp=self.tp + other.tp,
            cp=self.cp + other.cp,
            ep=self.ep + other.ep,
            launch=self.launch + other.launch,
            link=self.link + other.link,
        )

    def __mul__(self, times: float) -> "Terms":
        return Terms(
            products=self.products * times,
            attention=self.attention * times,
            elementwise=self.elementwise * times,
            tp=self.tp * times,
            cp=self.cp * times,
            ep=self.ep * times,
            launch=self.launch * times,
            link=self.link * times,
        )


NOTHING = Terms()


class Passes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One microbatch through some part of the model."""

    forward: Terms = NOTHING
    again: Terms = NOTHING  # what the backward computes anew
    input: Terms = NOTHING  # gradient of the part's input
    weight: Terms = NOTHING  # gradients of its weights

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.again.seconds + self.input.seconds + self.weight.seconds

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            forward=self.forward + other.forward,
            again=self.again + other.again,
            input=self.input + other.input,
            weight=self.weight + other.weight,
        )

    def __mul__(self, times: float) -> "Passes":
        return Passes(
            forward=self.forward * times, again=self.again * times, input=self.input * times, weight=self.weight * times
        )
