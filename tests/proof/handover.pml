/* The hand-over of slots between processes, as PostgreSQL runs it: one semaphore, its rows, and every order of steps.

   The names are those of the code and of docs/internals.md. A statement is two steps: it sees the rows and locks some
   of them (a snapshot), and it commits. What waits for a row's lock waits here too. Times are as few as can differ:
   a lease is fresh, then over by its holder's own clock, then over by the database's.

   Mistakes to put back: -DGRANTS_IN_ONE, -DNO_SECOND_LOOK, -DNO_GRACE, -DIGNORES_LEASE, -DNOT_IN_ORDER            */

#define N 3             /* clients: processes, each with one thread that asks                */
#define M 2             /* slots                                                             */
#ifndef CRASHES
#define CRASHES 1       /* how many of the clients may be killed                             */
#endif
#ifndef CUTS
#define CUTS 1          /* how many keeper's sessions may end, so that their beacons are out */
#endif
#ifndef STEPS
#define STEPS 1         /* how often the database's clock is set ahead                       */
#endif
#ifndef LATES
#define LATES 1         /* how often a lease may run out that its living holder has not renewed in time */
#endif
#define NONE N

byte permit[M] = NONE;  /* sqlsem_slot.permit_id; NONE: expires_us is NULL                   */
byte left[M];           /* of its lease: 2, 1: over for its holder, 0: run out               */
bool beacon[M];         /* its holder's beacon was lit when this row was written             */
byte suspect[M];        /* suspect_us: 0, 1: noted, 2: noted 1.5 s ago                       */
byte slot_lock[M] = NONE;
byte line[N];           /* sqlsem_waiter: 0: no row, else its place by queued_us             */
bool heard[N];          /* of a waiter: its expires_us has not come                          */
bool lit[N];            /* of a waiter: its beacon column                                    */
byte row_lock[N] = NONE;
byte name_lock = NONE;  /* LOCK: the semaphore's row                                         */
byte dark[N];           /* its beacon: 0: lit, 1: out, 2: out for more than a second         */
bool sure[N];           /* the holder may believe that its permit is live                    */
byte mine[N] = M;       /* the slot that it was granted                                      */
bool busy[N];           /* an operation is under way                                         */
bool looked[N];         /* it stands in line, and its second look is over                    */
byte brief[N];          /* whose brief statements were under way when it took its place      */
bool in_brief[N];
bool dead[N];
bool excused;           /* a client was killed in the middle: heartbeats find what it left   */
byte crashes, cuts, steps, lates;

#define free(s)    (permit[s] == NONE || left[s] == 0)
#ifdef IGNORES_LEASE
#define to_take(s) (slot_lock[s] == NONE && permit[s] != c)
#else
#define to_take(s) (slot_lock[s] == NONE && free(s))
#endif
#define is_out(s)  (permit[s] != NONE && permit[s] != c && left[s] && beacon[s] && dark[permit[s]] && slot_lock[s] == NONE)
#define waits(w)   (line[w] && heard[w])
#define somebody   (waits(0) || waits(1) || waits(2))
#define first(w)   (waits(w) && !(waits(0) && line[0] < line[w]) && !(waits(1) && line[1] < line[w]) \
                    && !(waits(2) && line[2] < line[w]))
#define HEAD(o)    if :: first(0) -> o = 0 :: first(1) -> o = 1 :: first(2) -> o = 2 :: else -> o = NONE fi
#define PICK(s)    if :: to_take(0) -> s = 0 :: !to_take(0) && to_take(1) -> s = 1 :: else -> s = M fi
#define GRANT(s, w) permit[s] = w; left[s] = 2; suspect[s] = 0; beacon[s] = lit[w]
#define may_end(s) (permit[s] != NONE && left[s] && slot_lock[s] == NONE && (lates < LATES || left[s] == 1 || dead[permit[s]]))
#define is_due     (left[mine[c]] < 2 || suspect[mine[c]] || !beacon[mine[c]] || !sure[c])
#define RENEW      left[mine[c]] = 2; suspect[mine[c]] = 0; beacon[mine[c]] = true; sure[c] = true
#define FREE(s)    permit[s] = NONE; left[s] = 0; suspect[s] = 0; beacon[s] = false

inline leaves_line(w) { /* DELETE FROM sqlsem_waiter; the places behind it are numbered anew, to keep them few */
  if
  :: line[w] -> i = 0; do :: i < N -> if :: line[i] > line[w] -> line[i]-- :: else fi; i++ :: else -> break od; line[w] = 0
  :: else
  fi; i = 0
}

inline commits_briefly() {
  in_brief[c] = false; brief[0] = brief[0] & ~(1 << c); brief[1] = brief[1] & ~(1 << c); brief[2] = brief[2] & ~(1 << c)
}

inline serve() { /* handoff.serve: a transaction under the lock of the semaphore's row, for as long as it helps */
  do
  :: atomic { d_step { name_lock == NONE ->                                                   /* LOCK, _HEADS, _FREE */
       HEAD(o);
       if :: o != NONE && slot_lock[0] == NONE && free(0) -> t = 0
          :: o != NONE && !(slot_lock[0] == NONE && free(0)) && slot_lock[1] == NONE && free(1) -> t = 1
          :: else -> t = M fi;
       if :: t != M -> name_lock = c; slot_lock[t] = c :: else -> o = NONE; busy[c] = false fi };
       if :: t == M -> break :: else fi }
     d_step { row_lock[o] == NONE -> if :: line[o] -> row_lock[o] = c :: else -> o = NONE fi }             /* LEFT */
     d_step { if :: o != NONE -> GRANT(t, o); leaves_line(o); row_lock[o] = NONE :: else fi;       /* _TAKE, COMMIT */
              slot_lock[t] = NONE; name_lock = NONE; o = NONE; t = M }
  od
}

inline look_around() { /* queue.wait: _STAY_AND_LOOK, beacons.burial; then handoff.grant */
  d_step { row_lock[c] == NONE -> busy[c] = true; looked[c] = true;
    if :: line[c] -> if :: !heard[c] -> looked[c] = false; brief[c] = in_brief[0] + 2 * in_brief[1] + 4 * in_brief[2] :: else fi;
                     heard[c] = true; lit[c] = !dark[c] :: else fi;
    i = 0; do
    :: i < M -> if :: is_out(i) && !dark[c] ->
#ifdef NO_GRACE
                      left[i] = 0
#else
                      if :: suspect[i] == 0 -> suspect[i] = 1 :: suspect[i] == 2 -> left[i] = 0 :: else fi
#endif
                   :: else fi; i++
    :: else -> break od; i = 0 }
  serve()
}

proctype Client(byte c) {
  byte t = M, o = NONE, i;
  { skip;
idle:
  atomic { d_step { mine[c] = M; looked[c] = false; sure[c] = false; busy[c] = true;         /* take_or_stand sees */
    in_brief[c] = true; lit[c] = !dark[c];
    if :: !somebody -> PICK(t) :: else -> t = M fi;
    if :: t != M -> slot_lock[t] = c :: else fi } }
  atomic { d_step { busy[c] = false; commits_briefly();                                        /* and commits */
    if :: t != M -> GRANT(t, c); slot_lock[t] = NONE; mine[c] = t; sure[c] = !lit[c] || dark[c] < 2
       :: else -> line[c] = 1 + (line[0] > 0) + (line[1] > 0) + (line[2] > 0); heard[c] = true;
                  brief[c] = in_brief[0] + 2 * in_brief[1] + 4 * in_brief[2]
    fi }
    if :: t != M -> t = M; goto held :: else fi }

waiting:                       /* a slot may be handed to it at any time; see runtime/queue.py */
  do
  :: permit[0] == c || permit[1] == c -> break
#ifdef NO_SECOND_LOOK
  :: !looked[c] && !brief[c] -> looked[c] = true
#endif
  :: (looked[c] || !brief[c]) && line[c] -> look_around()                                      /* SECOND_LOOK, HEARTBEAT */
  :: line[c] == 0 && permit[0] != c && permit[1] != c -> goto idle                             /* Waited.queue is None */
  :: atomic { row_lock[c] == NONE ->                                                           /* queue.leave */
       d_step { busy[c] = true; t = line[c]; leaves_line(c); looked[c] = false }
       if :: t -> t = M; goto idle :: else -> t = 0 fi }                                       /* zero rows: granted */
     do :: t < M -> d_step { slot_lock[t] == NONE -> if :: permit[t] == c -> FREE(t) :: else fi; t++ }     /* DISCARD */
        :: else -> break od;
     serve(); goto idle
  od;
  atomic { d_step { looked[c] = false; if :: permit[0] == c -> mine[c] = 0 :: else -> mine[c] = 1 fi } }
  atomic { d_step { slot_lock[mine[c]] == NONE || permit[mine[c]] != c ->                      /* renewal.renew confirms it */
    if :: permit[mine[c]] == c && !dark[c] -> RENEW :: else fi }
    if :: !sure[c] && permit[mine[c]] != c -> goto idle :: else fi }

held:
  do
  :: d_step { mine[c] != M && !dark[c] && slot_lock[mine[c]] == NONE && is_due ->               /* renewal.renew */
       if :: permit[mine[c]] == c -> RENEW :: else -> sure[c] = false fi }
  :: d_step { sure[c] = false; busy[c] = true }                                                /* handoff.release */
     if :: goto plain :: goto pass fi                                                          /* the other is wanted */
  od;
plain:
  atomic { d_step { permit[mine[c]] != c || slot_lock[mine[c]] == NONE ->                      /* free_sql sees */
    if :: permit[mine[c]] == c && !somebody -> slot_lock[mine[c]] = c; in_brief[c] = true :: else fi }
    if :: !in_brief[c] -> goto pass :: else fi }
  atomic { d_step { FREE(mine[c]); slot_lock[mine[c]] = NONE; busy[c] = false; commits_briefly() }               /* and commits */
    goto idle }
pass:
  atomic { d_step { permit[mine[c]] != c || slot_lock[mine[c]] == NONE ->                      /* _PASS_IN_ONE sees */
    HEAD(o);
#ifdef NOT_IN_ORDER
    if :: o != NONE && row_lock[o] != NONE -> o = (o + 1) % N; if :: waits(o) :: else -> o = (o + 1) % N fi :: else fi;
#endif
    if :: permit[mine[c]] != c -> t = 3                                                        /* GONE */
       :: permit[mine[c]] == c && o != NONE && (row_lock[o] != NONE || !waits(o)) -> t = 2     /* RACED */
       :: permit[mine[c]] == c && o != NONE && row_lock[o] == NONE && waits(o) ->
          assert(first(o)); t = 1; row_lock[o] = c; slot_lock[mine[c]] = c                      /* nobody is passed over */
       :: permit[mine[c]] == c && o == NONE -> t = 0; slot_lock[mine[c]] = c                   /* nobody is seen */
    fi }
    if :: t == 2 -> t = M; o = NONE; goto pass
       :: t == 3 -> t = M; o = NONE; busy[c] = false; goto idle
       :: else fi }
  atomic {
    if
    :: t == 1 -> d_step { GRANT(mine[c], o); leaves_line(o); row_lock[o] = NONE;  /* and commits */
                  slot_lock[mine[c]] = NONE; o = NONE; t = M; busy[c] = false } goto idle
    :: t == 0 -> d_step { FREE(mine[c]); slot_lock[mine[c]] = NONE; t = M }
    fi }
#ifdef GRANTS_IN_ONE
  busy[c] = false;
#else
  if :: somebody -> serve() :: else -> busy[c] = false fi;                                     /* _was_missed */
#endif
  goto idle
  } unless { dead[c] };
end_dead:
  false
}

inline killed(c) { /* the database ends its session and rolls its transaction back */
  dead[c] = true; crashes++; excused = excused || busy[c]; busy[c] = false; sure[c] = false; dark[c] = 2; looked[c] = false;
  commits_briefly(); i = 0;
  do :: i < N -> if :: row_lock[i] == c -> row_lock[i] = NONE :: else fi; i++ :: else -> break od;
  i = 0; do :: i < M -> if :: slot_lock[i] == c -> slot_lock[i] = NONE :: else fi; i++ :: else -> break od;
  if :: name_lock == c -> name_lock = NONE :: else fi; i = 0
}

inline over(s) { /* the holder's own clock is the first to say so */
  if :: permit[s] != NONE && left[s] -> if :: left[s] == 2 && !dead[permit[s]] -> lates++ :: else fi;
     left[s]--; sure[permit[s]] = sure[permit[s]] && mine[permit[s]] != s :: else fi
}

active proctype World() { /* time, crashes and cuts */
  byte i, c;
  atomic { i = 0; do :: i < N -> run Client(i); i++ :: else -> break od; i = 0 }
end_world:
  do
  :: d_step { may_end(0) -> over(0) }
  :: d_step { may_end(1) -> over(1) }
  :: d_step { suspect[0] == 1 && dark[permit[0]] != 1 -> suspect[0] = 2 }
  :: d_step { suspect[1] == 1 && dark[permit[1]] != 1 -> suspect[1] = 2 }
  :: d_step { steps < STEPS -> steps++;                                                        /* the clock is set ahead */
       left[0] = 0; left[1] = 0; heard[0] = false; heard[1] = false; heard[2] = false;
       sure[0] = false; sure[1] = false; sure[2] = false }
  :: d_step { cuts < CUTS && !dead[0] && !dark[0] -> dark[0] = 1; cuts++ }    /* the clients are alike: it may as well be */
  :: d_step { crashes < CRASHES && !dead[0] -> c = 0; killed(c); c = 0 }      /* this one, or one of these                 */
  :: d_step { crashes < CRASHES && !dead[1] -> c = 1; killed(c); c = 0 }
  :: d_step { dark[0] == 1 && !dead[0] -> dark[0] = 2; sure[0] = false }
  :: d_step { dark[0] && !dead[0] -> dark[0] = 0 }                                             /* Beacon.light */
  od
}

#define stands(w)  (!sure[w] || permit[mine[w]] == w)
#define stuck(w)   (line[w] && heard[w] && looked[w] && !dead[w])
#define quiet      (!busy[0] && !busy[1] && !busy[2] && !excused)
#define unused     ((permit[0] == NONE && slot_lock[0] == NONE) || (permit[1] == NONE && slot_lock[1] == NONE))

active proctype Invariants() {
end_invariants:
  if
  :: d_step { !(stands(0) && stands(1) && stands(2)) -> assert(false) }   /* a holder's slot was given away */
  :: d_step { quiet && unused && (stuck(0) || stuck(1) || stuck(2)) -> assert(false) }    /* a wake-up is lost */
  fi
}
