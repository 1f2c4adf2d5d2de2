from __future__ import annotations
import contextlib, time, threading
import pytest
from django_sqlsem import semaphore, session_settings, sessions
from django_sqlsem.sessions import OwnSession
import django_sqlsem.keeper as k
def test_count(database):
    log=[]
    orig=sessions.own_connection
    def own(alias):
        c=orig(alias)
        def wrap(execute, sql, params, many, context):
            log.append(sql[:60]); return execute(sql,params,many,context)
        c.execute_wrappers.append(wrap)
        return c
    sessions.own_connection=own
    try:
        s=semaphore("count",slots=3,using=database)
        with s: pass
        print("\n", database, "first", len(log)); 
        log.clear()
        p=s.acquire(); a=list(log); log.clear(); p.release(); r=list(log); log.clear()
        print(" acquire",len(a),a," release",len(r),r)
        s2=semaphore("count",slots=3,take=2,using=database)
        p=s2.acquire(); a=list(log); log.clear(); p.release(); r=list(log); log.clear()
        print(" take2 acquire",len(a),a," release",len(r),r)
        ps=[s.acquire() for _ in range(1)]
        ps[0].detach(); ps.append(s.acquire()); ps[1].detach(); ps.append(s.acquire()); ps[2].detach(); log.clear()
        assert s.try_acquire() is None; print(" refused",len(log),log); log.clear()
        s.status(); print(" status",len(log),log); log.clear()
        ev=threading.Event()
        def w():
            with contextlib.suppress(Exception):
                s.acquire(timeout=3)
        t=threading.Thread(target=w); t.start(); t.join(); print(" waiting 3s alone", len(log)); log.clear()
        for p in ps: p.release()
    finally:
        sessions.own_connection=orig
