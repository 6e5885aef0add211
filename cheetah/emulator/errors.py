"""How a launch in the emulator can fail. Every message is a whole report: who, where in the text, in which state."""

from cheetah.errors import CheetahError


class EmulatorError(CheetahError):
    """A launch that did not end well."""


class Deadlock(EmulatorError):
    """Nobody can go on. The message has one line for each block, place and state, with the threads that wait there."""


class Misuse(EmulatorError):
    """A primitive was used against its rules, or the kernel touched an address that it must not."""


class Race(EmulatorError):
    """Two accesses that nothing orders, by their lines in the kernel text. Only a sanitized program reports it."""


class SwitchLimit(EmulatorError):
    """The launch was ended after the given number of fibre switches; the message is as for a deadlock."""


class TimeLimit(EmulatorError):
    """The launch was ended after the given time; the message is as for a deadlock."""
