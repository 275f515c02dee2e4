"""Gymnasium's classic control tasks, many users at once: the same dynamics, step by step, in compiled code.

`task` is the number of a task; states are what Gymnasium keeps, in double precision, and policies see the 32-bit
observations that it returns, scaled by the public bounds of the observation.
"""

from __future__ import annotations

import math

import numpy as np

from shufflerl.arrays import FloatArray, IntArray
from shufflerl.compiling import compiled
from shufflerl.envs.players import ACROBOT, CARTPOLE, MOUNTAIN_CAR

_ANGLE = 12 * 2 * math.pi / 360

#: For `squash`: 1 / log 2; a sum from which on doubles are whole; log 2 in two parts, the first with bits to spare.
_PER_DOUBLING, _WHOLE = 1.4426950408889634, 6755399441055744.0
_LOG_2, _LOG_2_REST = 6.93147180369123816490e-01, 1.90821492927058770002e-10


@compiled
def observe(task: int, state: FloatArray, seen: FloatArray) -> None:
    """What Gymnasium would return as the observation of a state."""
    if task == ACROBOT:
        seen[0], seen[1] = np.float32(math.cos(state[0])), np.float32(math.sin(state[0]))
        seen[2], seen[3] = np.float32(math.cos(state[1])), np.float32(math.sin(state[1]))
        seen[4], seen[5] = np.float32(state[2]), np.float32(state[3])
        return
    for i in range(len(state)):
        seen[i] = np.float32(state[i])


@compiled
def advance(task: int, state: FloatArray, action: int) -> tuple[float, bool]:
    """Take an action: its reward, and whether the episode is over; the state is changed."""
    if task == CARTPOLE:
        return _cartpole(state, action)
    if task == MOUNTAIN_CAR:
        return _mountain_car(state, action)
    return _acrobot(state, action)


@compiled
def _cartpole(state: FloatArray, action: int) -> tuple[float, bool]:
    x, speed, angle, turn = state[0], state[1], state[2], state[3]
    force = 10.0 if action == 1 else -10.0
    cosine, sine = math.cos(angle), math.sin(angle)
    total = 0.1 + 1.0
    pushed = (force + 0.05 * (turn * turn) * sine) / total
    turning = (9.8 * sine - cosine * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * (cosine * cosine) / total))
    pulling = pushed - 0.05 * turning * cosine / total
    x, speed = x + 0.02 * speed, speed + 0.02 * pulling
    angle, turn = angle + 0.02 * turn, turn + 0.02 * turning
    state[0], state[1], state[2], state[3] = x, speed, angle, turn
    return 1.0, x < -2.4 or x > 2.4 or angle < -_ANGLE or angle > _ANGLE


@compiled
def _mountain_car(state: FloatArray, action: int) -> tuple[float, bool]:
    place, speed = state[0], state[1]
    speed += (action - 1) * 0.001 + math.cos(3 * place) * (-0.0025)
    speed = min(max(speed, -0.07), 0.07)
    place = min(max(place + speed, -1.2), 0.6)
    if place == -1.2 and speed < 0:
        speed = 0.0
    state[0], state[1] = place, speed
    return -1.0, place >= 0.5 and speed >= 0


@compiled
def _slope(one: float, two: float, speed: float, other: float, torque: float) -> tuple[float, float]:
    """Accelerations of the two links."""
    d1 = 1.0 * 0.25 + 1.0 * (1.0 + 0.25 + 2 * 0.5 * math.cos(two)) + 1.0 + 1.0
    d2 = 1.0 * (0.25 + 0.5 * math.cos(two)) + 1.0
    phi2 = 0.5 * 9.8 * math.cos(one + two - math.pi / 2.0)
    phi1 = (
        -0.5 * other**2 * math.sin(two)
        - 2 * 0.5 * other * speed * math.sin(two)
        + (0.5 + 1.0) * 9.8 * math.cos(one - math.pi / 2)
        + phi2
    )
    second = (torque + d2 / d1 * phi1 - 0.5 * speed**2 * math.sin(two) - phi2) / (0.25 + 1.0 - d2**2 / d1)
    return -(d2 * second + phi1) / d1, second


@compiled
def _acrobot(state: FloatArray, action: int) -> tuple[float, bool]:
    torque, dt = action - 1.0, 0.2
    a, b, c, d = state[0], state[1], state[2], state[3]
    half = dt / 2.0
    e1, f1 = _slope(a, b, c, d, torque)
    c2, d2 = c + half * e1, d + half * f1
    e2, f2 = _slope(a + half * c, b + half * d, c2, d2, torque)
    c3, d3 = c + half * e2, d + half * f2
    e3, f3 = _slope(a + half * c2, b + half * d2, c3, d3, torque)
    c4, d4 = c + dt * e3, d + dt * f3
    e4, f4 = _slope(a + dt * c3, b + dt * d3, c4, d4, torque)
    a += dt / 6.0 * (c + 2 * c2 + 2 * c3 + c4)
    b += dt / 6.0 * (d + 2 * d2 + 2 * d3 + d4)
    c += dt / 6.0 * (e1 + 2 * e2 + 2 * e3 + e4)
    d += dt / 6.0 * (f1 + 2 * f2 + 2 * f3 + f4)
    while a > math.pi:
        a -= 2 * math.pi
    while a < -math.pi:
        a += 2 * math.pi
    while b > math.pi:
        b -= 2 * math.pi
    while b < -math.pi:
        b += 2 * math.pi
    c = min(max(c, -4 * math.pi), 4 * math.pi)
    d = min(max(d, -9 * math.pi), 9 * math.pi)
    state[0], state[1], state[2], state[3] = a, b, c, d
    over = -math.cos(a) - math.cos(b + a) > 1.0
    return (0.0 if over else -1.0), over


@compiled
def squash(values: FloatArray, count: int, powers: FloatArray, bits: IntArray) -> None:
    """Replace so many values by their tanh, nearly to the last bit; `bits` are those of the buffer `powers`.

    tanh x = e / (e + 2) with e = exp(2x) - 1. The exponential is 2^k (1 + p) with p a Taylor polynomial on at most
    half a logarithm of two: only arithmetic, so that the compiler takes several units in one instruction, where the
    tanh of `math` is called for one at a time.
    """
    for j in range(count):
        values[j] = 2.0 * min(max(values[j], -20.0), 20.0)
        powers[j] = values[j] * _PER_DOUBLING + _WHOLE  # the sum has no bits left for a fraction, k is its last ones
    for j in range(count):
        k = powers[j] - _WHOLE
        rest = values[j] - k * _LOG_2 - k * _LOG_2_REST
        p = rest / 479001600 + 1 / 39916800
        p = ((p * rest + 1 / 3628800) * rest + 1 / 362880) * rest + 1 / 40320
        p = ((p * rest + 1 / 5040) * rest + 1 / 720) * rest + 1 / 120
        p = (((p * rest + 1 / 24) * rest + 1 / 6) * rest + 0.5) * rest + 1.0
        values[j] = p * rest
    for j in range(count):
        bits[j] = (bits[j] + 1023) << 52
    for j in range(count):
        e = values[j] * powers[j] + (powers[j] - 1.0)
        values[j] = e / (e + 2.0)


@compiled
def choose(
    parameters: FloatArray, layers: IntArray, values: FloatArray, after: FloatArray, powers: FloatArray, bits: IntArray
) -> int:
    """The action of a network with the head "choice" on the observation in `values`; all buffers are written over."""
    start = 0
    for layer in range(len(layers) - 1):
        inputs, outputs = layers[layer], layers[layer + 1]
        biases = start + inputs * outputs
        for j in range(outputs):
            after[j] = parameters[biases + j]
        for i in range(inputs):
            value, row = values[i], start + i * outputs
            for j in range(outputs):
                after[j] += value * parameters[row + j]
        if layer < len(layers) - 2:
            squash(after, outputs, powers, bits)
        for j in range(outputs):
            values[j] = after[j]
        start = biases + outputs
    best, most = 0, 0.0
    for j in range(layers[-1]):
        if values[j] > most:
            best, most = j + 1, values[j]
    return best


@compiled
def play_tasks(
    task: int,
    parameters: FloatArray,
    layers: IntArray,
    middle: FloatArray,
    scale: FloatArray,
    given: IntArray,
    states: FloatArray,
    horizon: int,
    returns: FloatArray,
) -> None:
    """Play every user i from states[i] by policy given[i] for at most so many steps; write returns[i]."""
    inputs = layers[0]
    values, after, powers = np.empty(max(layers.max(), inputs)), np.empty(layers.max()), np.empty(layers.max())
    bits = powers.view(np.int64)
    for i in range(len(given)):
        policy, state, total = parameters[given[i]], states[i], 0.0
        for _ in range(horizon):
            observe(task, state, values)
            for j in range(inputs):
                values[j] = (values[j] - middle[j]) / scale[j]
            reward, over = advance(task, state, choose(policy, layers, values, after, powers, bits))
            total += reward
            if over:
                break
        returns[i] = total
