"""A local linear trend followed by a Kalman filter: level and trend of a series, one step ahead."""

from __future__ import annotations

from dataclasses import dataclass

Q_LEVEL = 1.0
Q_TREND = 0.1
R = 10.0
P_FIRST = 1000.0


@dataclass(frozen=True, slots=True)
class Kalman:
    """The state after some values, and how sure it is; leading zeros are no values.

    Attributes:
        level, trend: None before the first value. a, b, c: covariance [[a, b], [b, c]].
    """

    level: float | None = None
    trend: float = 0.0
    a: float = P_FIRST
    b: float = 0.0
    c: float = P_FIRST

    def add(self, value: float) -> Kalman:
        """With one more value."""
        if self.level is None:
            return self if value == 0 else Kalman(value)
        level = self.level + self.trend
        a = self.a + 2 * self.b + self.c + Q_LEVEL
        b, c = self.b + self.c, self.c + Q_TREND
        gain_level, gain_trend = a / (a + R), b / (a + R)
        off = value - level
        return Kalman(
            level + gain_level * off,
            self.trend + gain_trend * off,
            a - gain_level * a,
            b - gain_level * b,
            c - gain_trend * b,
        )

    @property
    def next(self) -> float:
        """The value expected next; 0 before the first."""
        return 0.0 if self.level is None else self.level + self.trend


UNSEEN = Kalman()
