"""A test bench for the privacy claim: plays neighbouring batches through a system and looks for a leak.

Nothing here is simulated and nothing can be seeded: what users and servers draw comes from the system's own code with
the operating system's randomness. Two batches differ in one user's whole trajectory, so that every counter that can
change does. What an observer who knows everybody else can tell about that user is measured and held against the claim;
the noise, the messages and their order are held against their declared laws. Most batches ask for every counter; some
ask for fewer, as learners do, and must have all their noise.

What is attacked is a `System`. `InMemory` is the protocol alone, its three functions, with noise by users;
`ServersInMemory` that with noise by both servers, who are two observers; `shufflerl.network.audit` has the networked
system, from nodes to coordinator.

An audit finds faults; it proves no privacy. That is the accountant's part, and what it assumes is what is tested here.

>>> from shufflerl.privacy.accounting import Budget
>>> for system in (InMemory(), ServersInMemory()):
...     report = audit(Budget(8.0, 1e-3), samples=150, level=1e-6, system=system)
...     print(report.passed, report.epsilon_lower_bound < report.claimed_epsilon)
True True
True True
"""

from shufflerl.privacy.audit.auditing import MIN_SAMPLES, audit
from shufflerl.privacy.audit.bench import USERS, Session, System, Transcript
from shufflerl.privacy.audit.report import AuditReport, Finding
from shufflerl.privacy.audit.servers import ServersInMemory, ServersSession
from shufflerl.privacy.audit.users import InMemory, UsersSession

__all__ = [
    "MIN_SAMPLES",
    "USERS",
    "AuditReport",
    "Finding",
    "InMemory",
    "ServersInMemory",
    "ServersSession",
    "Session",
    "System",
    "Transcript",
    "UsersSession",
    "audit",
]
