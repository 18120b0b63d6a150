-- weights_in_use: whether a checkpoint ('c'), a living sampler ('s') or a load in some run's log ('l')
-- refers to weights. Users that ended (expired, a name that moved on, a log that was cut) are struck off.
local function is_user(ref, kind, name)
  if kind == 's' then
    return redis.call('EXISTS', 'cotrain:sampler:' .. name) == 1
  elseif kind == 'l' then
    local pool, run, seq = string.match(name, '^({[^}]*}:)(.*):(%d+)$')
    local prefix = 'cotrain:' .. pool
    return redis.call('HEXISTS', prefix .. 'ops:' .. run, seq) == 1
  end
  local record = redis.call('GET', 'cotrain:checkpoint:' .. name)
  return record and cjson.decode(record)['weights'] == ref
end

local function in_use(ref)
  local users, used = 'cotrain:weights:' .. ref .. ':users', false
  for _, user in ipairs(redis.call('SMEMBERS', users)) do
    local kind, name = string.sub(user, 1, 1), string.sub(user, 3)
    if is_user(ref, kind, name) then
      used = true
    else
      redis.call('SREM', users, user)
      local session = kind == 's' and string.match(name, '^(.*):sample:')
      if session then
        redis.call('SREM', 'cotrain:session:' .. session .. ':samplers', name)
      end
    end
  end
  return used
end
