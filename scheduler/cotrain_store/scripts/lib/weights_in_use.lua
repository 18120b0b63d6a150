-- weights_in_use: return true if a checkpoint ('c'), a live sampler ('s') or a load in a run's log ('l') refers to
-- weights. Ended users (expired, a name with other weights, a cut log) are removed.
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
