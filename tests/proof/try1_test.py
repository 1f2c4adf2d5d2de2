import pytest, time, sys, os
from itertools import combinations_with_replacement as cwr
from tests.proof.explore import Explorer
from tests.proof.operations import OPERATIONS, Scenario, base_for
from tests.proof.world import World, stopped_clock
def test_it(database):
    only = os.environ.get("ONLY")
    start = time.time(); total=[0]*5; broken={}
    with stopped_clock(database):
        world = World(database); ex = Explorer(world)
        try:
            for names in cwr(OPERATIONS, 2):
                if only and " | ".join(names) != only: continue
                for line, free in ((0,0),(1,0),(0,1)):
                    t=time.time(); c=time.process_time()
                    f = ex.explore(Scenario(names, base_for(names, line=line, free=free)), faults=int(os.environ.get("FAULTS","0")))
                    total[0]+=f.schedules; total[1]+=f.states; total[2]+=f.runs; total[3]+=1
                    if f.broken: print(f, flush=True)
                    if time.time()-t>5 or only: print(f.scenario, f.states, f.schedules, f.runs, round(time.time()-t,1), round(time.process_time()-c,1), flush=True)
            print("TOTAL", total, time.time()-start, time.process_time())
        finally:
            ex.close(); world.close()
