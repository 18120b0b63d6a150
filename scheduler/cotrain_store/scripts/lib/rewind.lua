-- rewind: return of a run's log and history to an earlier optimizer step, at the commit of its REWIND.
-- needs: history

-- Drop the recovery copies after the op to which the run returns, because a replay cannot start from them: the log
-- has the ops after the older copy. The copy after this op is the next one.
local function drop_copies(log, to_seq)
  local row = redis.call('HMGET', log, 'snap', 'oldsnap', 'oldfile', 'oldsha', 'numerics', 'oldnumerics')
  if tonumber(row[1] or -1) <= to_seq then
    return
  end
  local numerics, older = row[5], row[6]
  if older and older ~= '' and numerics and numerics ~= older then
    numerics = 'mixed'
  end
  redis.call('HSET', log, 'snap', row[2] or -1, 'snapfile', row[3] or '', 'snapsha', row[4] or '',
    'oldsnap', row[2] or -1, 'oldfile', '', 'oldsha', '', 'oldnumerics', '')
  if numerics or older then
    redis.call('HSET', log, 'numerics', numerics or older)
  end
end

-- Returns the change of the number of points.
local function rewind_run(history, run, log, seq, entry)
  drop_copies(log, entry.to_seq)
  redis.call('HSET', log, 'rewind:' .. seq, entry.to_seq, 'rewound', seq)
  for abandoned = entry.to_seq + 1, seq - 1 do
    redis.call('HDEL', log, 'step:' .. abandoned)
  end
  history.steps = entry.to_step
  forget_passes(history)
  return cut_points(run, entry.to_seq)
end
